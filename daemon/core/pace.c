#include "core/pace.h"

#define SECOND_US 1000000u

static struct pace_user *pace_find(struct pace *p, uid_t uid, uint64_t now_us)
{
	struct pace_user *oldest = &p->users[0];

	for (unsigned i = 0; i < PACE_USERS; i++) {
		struct pace_user *u = &p->users[i];

		if (u->filled_us && u->uid == uid)
			return u;
		if (u->filled_us < oldest->filled_us)
			oldest = u;
	}
	*oldest = (struct pace_user){ .uid = uid, .left = p->burst, .filled_us = now_us };
	return oldest;
}

static void pace_fill(const struct pace *p, struct pace_user *u, uint64_t now_us)
{
	uint64_t more = (now_us - u->filled_us) * p->a_second / SECOND_US;

	if (!more)
		return;
	u->left = u->left + more > p->burst ? p->burst : u->left + (uint32_t)more;
	u->filled_us = now_us;
}

bool pace_take(struct pace *p, uid_t uid, uint64_t now_us, uint64_t *ret_skipped)
{
	struct pace_user *u = pace_find(p, uid, now_us);

	pace_fill(p, u, now_us);
	if (!u->left) {
		u->skipped++;
		return false;
	}
	u->left--;
	*ret_skipped = u->skipped;
	u->skipped = 0;
	return true;
}
