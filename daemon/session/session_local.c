/* Requests of the local channel to a session: the session of a token, slabs, its ring. */
#include <errno.h>
#include <stdlib.h>

#include "core/check.h"
#include "job/base.h"
#include "net/local.h"
#include "session/session.h"

/* The channel's userdata: lives from the connection to its end. */
struct channel {
	struct session_local sl;
	struct sessions *sessions;
	struct list link; /* sessions->locals */
	void (*closed)(void *userdata);
	void *userdata;
};

static int session_local_on_hello(struct local *l, const uint8_t token[SHD1_TOKEN_BYTES],
				  void *userdata, uint64_t *ret_session, struct fault *f)
{
	struct channel *ch = userdata;
	struct session *s = session_by_token(ch->sessions, token);

	/* the token alone could have leaked; the user must be the same too */
	if (!s || proc_uid(conn_proc(local_conn(l))) != proc_uid(s->proc))
		return fault_set(f, FAULT_DENIED, "token",
				 "no session of this user has this token");
	ch->sl.session = s;
	session_channel_came(s);
	conn_attached(local_conn(l));
	list_append(&s->locals, &ch->sl.link);
	*ret_session = s->id;
	return 0;
}

/* The slab of a generation that it has leased, or may hold. */
static struct slab *session_local_leased(const struct session *s, uint32_t id)
{
	const struct publication_lease *l, *tmp;
	const struct board_reader *r, *tmp2;
	struct slab *slab = NULL;

	list_for_each (l, tmp, (struct list *)(uintptr_t)&s->leases, held)
		if (l->g && l->g->slab->id == id)
			return l->g->slab;
	list_for_each (r, tmp2, (struct list *)(uintptr_t)&s->holds, held)
		if (!slab)
			slab = publication_slab_for(r, id);
	return slab;
}

static struct slab *session_local_of_base(const struct session *s, uint32_t id)
{
	const struct base_reader *r, *tmp;
	struct slab *slab = NULL;

	list_for_each (r, tmp, (struct list *)(uintptr_t)&s->bases, held)
		if (!slab)
			slab = base_slab(r->job, id);
	return slab;
}

/* The slab, if the session may have it. */
static struct slab *session_local_slab_for(const struct session *s, uint32_t id)
{
	struct slab *slab = s ? session_local_leased(s, id) : NULL;

	if (!slab && s)
		slab = session_local_of_base(s, id);
	if (slab)
		return slab;
	return s && s->member ? job_slab_for(s->member, id) : NULL;
}

static int session_local_on_get_slab(struct local *l, uint32_t id, void *userdata,
				     struct local_slab *ret, struct fault *f)
{
	struct channel *ch = userdata;
	struct slab *slab = session_local_slab_for(ch->sl.session, id);
	int r;

	(void)l;
	if (!slab)
		return fault_set(f, FAULT_NOT_FOUND, "slab", "this session has no slab %u", id);
	r = slab_export(slab, &ret->fd, &ret->writable);
	if (r < 0)
		return fault_errno(f, r, "handing out a slab");
	ret->bytes = slab->bytes;
	ret->lasts = slab->stored;
	ret->pages = backend_info(slab->device->backend)->ordinal < 0;
	return 0;
}

static int session_local_on_get_ring(struct local *l, uint32_t part, void *userdata, int *ret_fd,
				     uint64_t *ret_bytes, struct fault *f)
{
	struct channel *ch = userdata;
	struct session *s = ch->sl.session;

	(void)l;
	if (!s || !s->sessions->rings)
		return fault_set(f, FAULT_UNAVAILABLE, NULL, "there are no rings");
	return s->sessions->rings->get(s, part, ret_fd, ret_bytes, f);
}

static void session_local_on_closed(struct local *l, void *userdata)
{
	struct channel *ch = userdata;

	(void)l;
	list_unlink(&ch->sl.link);
	list_unlink(&ch->link);
	ch->closed(ch->userdata);
	free(ch);
}

int session_local_new(struct sessions *s, uv_loop_t *loop, struct conn *c,
		      uint64_t frame_timeout_us, void (*closed)(void *userdata), void *userdata)
{
	static const struct local_ops ops = { session_local_on_hello, session_local_on_get_slab,
					      session_local_on_get_ring, session_local_on_closed };
	struct channel *ch = calloc(1, sizeof(*ch));
	int r;

	if (!ch)
		return -ENOMEM;
	list_init(&ch->sl.link);
	list_init(&ch->link);
	ch->sessions = s;
	ch->closed = closed;
	ch->userdata = userdata;
	r = local_new(loop, c, &ops, ch, frame_timeout_us, &ch->sl.local);
	if (r < 0)
		free(ch);
	else
		list_append(&s->locals, &ch->link);
	return r;
}

void sessions_close_locals(struct sessions *s)
{
	struct channel *ch, *tmp;

	list_for_each (ch, tmp, &s->locals, link)
		local_close(ch->sl.local);
}
