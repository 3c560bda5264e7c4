/* What the files of this folder have of cutfix.c. */
#ifndef SHARDD_TESTS_PARTITION_CUTINNER_H
#define SHARDD_TESTS_PARTITION_CUTINNER_H

/* Something happens: options.on_event is called. */
void cutfix_event(void);
/* A rule is broken. The first one counts. */
void cutfix_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* What is called from here on is of @node. */
void cutfix_enter(unsigned node);
const char *cutfix_name(unsigned node);
/* The node does what it can without messages, and so does its rank. */
void cutfix_go_on(unsigned node);

#endif
