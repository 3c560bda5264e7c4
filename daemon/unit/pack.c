#include "unit/pack.h"

#include "core/check.h"

bool unit_is_packed(const struct unit *u)
{
	return u->layout.dim0 && u->spread > 1;
}

static char *pack_element(const struct unit_array *a, uint64_t i)
{
	return (char *)a->at + i * dtype_size(a->dtype);
}

/* One row of the operation is the piece of the tensor on one part. */
static struct launch pack(const struct unit *u, const struct unit_tensor *t, bool unpack,
			  const struct unit_array *full, const struct unit_array *parts)
{
	uint64_t each = layout_part_ranks(&u->layout, u->spread), row = each * t->piece;
	uint64_t stride = t->frozen ? unit_frozen_elements(u) : unit_part_elements(u);
	uint64_t base = t->frozen ? unit_part_elements(u) * u->spread : 0;
	void *in_full = pack_element(full, unit_tensor_full(u, t));
	void *in_parts = pack_element(parts, base + each * t->at);
	struct launch launch = { .kind = LAUNCH_PACK, .n = row * u->spread };

	launch.pack = (struct k_pack){ .dst = unpack ? in_full : in_parts,
				       .src = unpack ? in_parts : in_full,
				       .row_elements = row,
				       .dst_stride = unpack ? row : stride,
				       .src_stride = unpack ? stride : row,
				       .dst_dtype = unpack ? full->dtype : parts->dtype,
				       .src_dtype = unpack ? parts->dtype : full->dtype };
	return launch;
}

static unsigned pack_all(const struct unit *u, enum unit_which which, bool unpack,
			 const struct unit_array *full, const struct unit_array *parts,
			 struct launch *launches)
{
	unsigned n = 0;

	CHECK(unit_is_packed(u));
	for (uint32_t i = 0; i < u->rec->n_tensors; i++) {
		const struct unit_tensor *t = &u->tensors[i];

		if (!t->alias && which & (t->frozen ? UNIT_FROZEN : UNIT_TRAINED))
			launches[n++] = pack(u, t, unpack, full, parts);
	}
	return n;
}

unsigned unit_unpack_launches(const struct unit *u, enum unit_which which,
			      const struct unit_array *full, const struct unit_array *parts,
			      struct launch *launches)
{
	return pack_all(u, which, true, full, parts, launches);
}

unsigned unit_pack_launches(const struct unit *u, enum unit_which which,
			    const struct unit_array *parts, const struct unit_array *full,
			    struct launch *launches)
{
	return pack_all(u, which, false, full, parts, launches);
}
