/* The page that shows the status: files of page/, which are part of the program. */
#include <string.h>

#include "core/check.h"
#include "http/http_impl.h"

/* SHARDD_PAGE_DIR is where they are during the build. */
#define HTTP_PAGE_FILE(name, file)                                                \
	__asm__(".pushsection .rodata\n"                                          \
		".global http_page_" #name "\n"                                   \
		".global http_page_" #name "_end\n"                               \
		"http_page_" #name ": .incbin \"" SHARDD_PAGE_DIR "/" file "\"\n" \
		"http_page_" #name "_end: .byte 0\n"                              \
		".popsection\n");                                                 \
	extern const char http_page_##name[], http_page_##name##_end[];

HTTP_PAGE_FILE(html, "index.html")
HTTP_PAGE_FILE(style, "page.css")
HTTP_PAGE_FILE(icon, "icon.svg")
HTTP_PAGE_FILE(page, "page.js")
HTTP_PAGE_FILE(dom, "dom.js")
HTTP_PAGE_FILE(jobs, "jobs.js")
HTTP_PAGE_FILE(memory, "memory.js")
HTTP_PAGE_FILE(more, "more.js")
HTTP_PAGE_FILE(past, "past.js")
HTTP_PAGE_FILE(problems, "problems.js")
HTTP_PAGE_FILE(publications, "publications.js")
HTTP_PAGE_FILE(samples, "samples.js")
HTTP_PAGE_FILE(timeline, "timeline.js")
HTTP_PAGE_FILE(units, "units.js")

static enum MHD_Result http_page_answer(struct http_request *r);

#define HTTP_TYPE_SCRIPT "text/javascript; charset=utf-8"
#define HTTP_PAGE(name, path_, type_)                                                \
	{                                                                            \
		.route = { path_, type_, .open = true, .answer = http_page_answer }, \
		.from = http_page_##name, .to = http_page_##name##_end,              \
	}

static const struct http_page {
	struct http_route route;
	const char *from, *to;
} http_pages[] = {
	HTTP_PAGE(html, "/", "text/html; charset=utf-8"),
	HTTP_PAGE(style, "/page.css", "text/css; charset=utf-8"),
	HTTP_PAGE(icon, "/icon.svg", "image/svg+xml"),
	HTTP_PAGE(page, "/page.js", HTTP_TYPE_SCRIPT),
	HTTP_PAGE(dom, "/dom.js", HTTP_TYPE_SCRIPT),
	HTTP_PAGE(jobs, "/jobs.js", HTTP_TYPE_SCRIPT),
	HTTP_PAGE(memory, "/memory.js", HTTP_TYPE_SCRIPT),
	HTTP_PAGE(more, "/more.js", HTTP_TYPE_SCRIPT),
	HTTP_PAGE(past, "/past.js", HTTP_TYPE_SCRIPT),
	HTTP_PAGE(problems, "/problems.js", HTTP_TYPE_SCRIPT),
	HTTP_PAGE(publications, "/publications.js", HTTP_TYPE_SCRIPT),
	HTTP_PAGE(samples, "/samples.js", HTTP_TYPE_SCRIPT),
	HTTP_PAGE(timeline, "/timeline.js", HTTP_TYPE_SCRIPT),
	HTTP_PAGE(units, "/units.js", HTTP_TYPE_SCRIPT),
};

static enum MHD_Result http_page_answer(struct http_request *r)
{
	const struct http_page *p = CONTAINER_OF(r->route, struct http_page, route);

	return http_answer(r, MHD_HTTP_OK, r->route->type, p->from, (size_t)(p->to - p->from));
}

const struct http_route *http_page_find(const char *path)
{
	for (size_t i = 0; i < ARRAY_SIZE(http_pages); i++)
		if (strcmp(path, http_pages[i].route.path) == 0)
			return &http_pages[i].route;
	return NULL;
}
