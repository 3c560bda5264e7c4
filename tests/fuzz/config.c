/* The configuration file as an enemy writes it. What is accepted must survive being
 * written and read again. */
#include <stdlib.h>
#include <string.h>

#include "config/config.h"
#include "core/check.h"
#include "core/cleanup.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_round_trip(const struct config *c)
{
	_cleanup_(freep) char *text = NULL;
	struct fault f = FAULT_NULL;
	struct config again;
	size_t bytes = 0;
	FILE *out = open_memstream(&text, &bytes);

	CHECK(out);
	config_write(c, out);
	fclose(out);
	config_default(&again);
	CHECK(config_load_text(&again, text, bytes, "again", &f) == 0);
	CHECK(memcmp(&again, c, sizeof(again)) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct fault f = FAULT_NULL;
	struct config c, before;

	config_default(&c);
	before = c;
	if (config_load_text(&c, (const char *)data, size, "fuzz", &f) == 0) {
		CHECK(f.code == FAULT_NONE);
		check_round_trip(&c);
	} else {
		CHECK(f.code == FAULT_INVALID && f.text[0]);
		CHECK(memcmp(&c, &before, sizeof(c)) == 0);
	}
	return 0;
}
