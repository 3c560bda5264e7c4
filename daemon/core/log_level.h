/* The levels of the log. No state, any thread. */
#ifndef SHARDD_CORE_LOG_LEVEL_H
#define SHARDD_CORE_LOG_LEVEL_H

enum log_level { LOG_ERROR = 0, LOG_WARN, LOG_INFO, LOG_DEBUG, _LOG_N };

/* error, warn, info, debug. Return: the level, or -1. */
int log_level_parse(const char *name);
const char *log_level_name(enum log_level level);

#endif
