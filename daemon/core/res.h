/*
 * How a step of something that may have to wait ends. A function that returns it never frees
 * what it was given: only the runner of ticks does (work/coll.h).
 */
#ifndef SHARDD_CORE_RES_H
#define SHARDD_CORE_RES_H

enum res {
	RES_DONE,  /* it is there, or there was nothing to do: go on */
	RES_WAIT,  /* it is under way: the caller is ticked again when it makes sense to ask */
	RES_FAILED /* the cause is in the fault of what was given */
};

/* Of a function that does not wait. @code: 0, or a fault code that its caller has in a fault. */
static inline enum res res_of(int code)
{
	return code ? RES_FAILED : RES_DONE;
}

/* Go on if @x is done, else return what it is: a tick reads as the list of what it waits for. */
#define RES_TRY(x)                    \
	do {                          \
		enum res res_ = (x);  \
		if (res_ != RES_DONE) \
			return res_;  \
	} while (0)

/* In a tick: the next stage begins at once. */
#define fallthrough __attribute__((fallthrough))

#endif
