#include "fault.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <ucontext.h>
#include <unistd.h>

#include "core/check.h"

#define MAX_EXPLAINERS 4u

static _Atomic(fault_explainer) fault_explainers[MAX_EXPLAINERS];
static atomic_uint fault_n_explainers;

/* What SIGSEGV did before. */
static struct sigaction fault_before;

const char *fault_verb(enum fault_access access)
{
	static const char *const verbs[] = { "read of 0x", "write to 0x", "access to 0x" };

	return verbs[access];
}

void fault_add(struct fault_text *t, const char *s)
{
	while (*s && t->n < sizeof(t->text))
		t->text[t->n++] = *s++;
}

void fault_add_number(struct fault_text *t, uint64_t x, unsigned base)
{
	char digits[24];
	size_t i = sizeof(digits) - 1;

	digits[i] = '\0';
	do {
		digits[--i] = "0123456789abcdef"[x % base];
		x /= base;
	} while (x);
	fault_add(t, digits + i);
}

/* ---------------------------------------------------------------- the handler */

/* Everything here may run in a signal handler. */

static enum fault_access fault_access_of(const void *context)
{
#if defined(__x86_64__)
	const ucontext_t *u = context;

	return u->uc_mcontext.gregs[REG_ERR] & 2 ? FAULT_WRITE : FAULT_READ;
#else
	(void)context;
	return FAULT_ANY;
#endif
}

static void fault_say(const struct fault_text *t)
{
	size_t done = 0;

	while (done < t->n) {
		ssize_t r = write(STDERR_FILENO, t->text + done, t->n - done);

		if (r < 0 && errno == EINTR)
			continue;
		if (r <= 0)
			break;
		done += (size_t)r;
	}
}

/* Return: shall the instruction be executed again? */
static bool fault_explain(uintptr_t at, enum fault_access access)
{
	enum fault_answer answer = FAULT_UNKNOWN;
	struct fault_text t = { .n = 0 };

	for (size_t i = 0; i < MAX_EXPLAINERS && answer == FAULT_UNKNOWN; i++) {
		fault_explainer explain = atomic_load(&fault_explainers[i]);

		if (explain)
			answer = explain(at, access, &t);
	}
	fault_say(&t);
	return answer == FAULT_REPAIRED;
}

/* As the kernel would have called it: with its mask, and once if it wants to be called once. */
static void fault_call_before(int number, siginfo_t *info, void *context)
{
	const struct sigaction *b = &fault_before;
	struct sigaction once = { .sa_handler = SIG_DFL };
	sigset_t mask = b->sa_mask;

	if (b->sa_flags & (int)SA_RESETHAND)
		sigaction(number, &once, NULL);
	pthread_sigmask(SIG_BLOCK, &mask, NULL);
	if (b->sa_flags & SA_NODEFER) {
		sigemptyset(&mask);
		sigaddset(&mask, number);
		pthread_sigmask(SIG_UNBLOCK, &mask, NULL);
	}
	if (b->sa_flags & SA_SIGINFO)
		b->sa_sigaction(number, info, context);
	else
		b->sa_handler(number);
}

static void fault_on_signal(int number, siginfo_t *info, void *context)
{
	bool fault = info->si_code > 0; /* else kill() or the like */
	struct sigaction again = { .sa_handler = SIG_DFL };
	int saved = errno;
	bool repaired = fault && fault_explain((uintptr_t)info->si_addr, fault_access_of(context));

	errno = saved;
	if (repaired)
		return;
	if (!(fault_before.sa_flags & SA_SIGINFO) && fault_before.sa_handler == SIG_IGN && !fault)
		return;
	if (!(fault_before.sa_flags & SA_SIGINFO) &&
	    (fault_before.sa_handler == SIG_DFL || fault_before.sa_handler == SIG_IGN)) {
		/* The same instruction faults again, now without this handler: the process ends,
		 * and its core file shows that instruction. */
		sigaction(number, &again, NULL);
		if (!fault)
			raise(number);
		return;
	}
	fault_call_before(number, info, context);
}

static void fault_install(void)
{
	struct sigaction ours = { .sa_sigaction = fault_on_signal,
				  .sa_flags = SA_SIGINFO | SA_ONSTACK };

	sigemptyset(&ours.sa_mask);
	CHECK(sigaction(SIGSEGV, NULL, &fault_before) == 0);
	CHECK(sigaction(SIGSEGV, &ours, NULL) == 0);
}

void fault_begin(fault_explainer explain)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;
	unsigned i = atomic_fetch_add(&fault_n_explainers, 1);

	CHECK(i < MAX_EXPLAINERS);
	atomic_store(&fault_explainers[i], explain);
	pthread_once(&once, fault_install);
}
