#include "core/log_level.h"

#include <string.h>

static const char *const level_names[_LOG_N] = {
	[LOG_ERROR] = "error",
	[LOG_WARN] = "warn",
	[LOG_INFO] = "info",
	[LOG_DEBUG] = "debug",
};

int log_level_parse(const char *name)
{
	for (int i = 0; i < _LOG_N; i++)
		if (strcmp(name, level_names[i]) == 0)
			return i;
	return -1;
}

const char *log_level_name(enum log_level level)
{
	return level < _LOG_N ? level_names[level] : "?";
}
