#include "backend/kop.h"

#include "core/check.h"

void kop_run(const struct kernels *k, const struct kop *kop, uint64_t begin, uint64_t end)
{
	CHECK(begin <= end && end <= kop->n);
	switch (kop->kind) {
	case KOP_CAST:
		k->cast(&kop->cast, begin, end);
		break;
	case KOP_REDUCE:
		k->reduce(&kop->reduce, begin, end);
		break;
	case KOP_ALL_REDUCE:
		k->all_reduce(&kop->all_reduce, begin, end);
		break;
	case KOP_ADAMW:
		k->adamw(&kop->adamw, begin, end);
		break;
	case KOP_ADAM:
		k->adam(&kop->adam, begin, end);
		break;
	case KOP_SGD:
		k->sgd(&kop->sgd, begin, end);
		break;
	case KOP_NORM:
		k->norm(&kop->norm, begin, end);
		break;
	case KOP_SCALE:
		k->scale(&kop->scale, begin, end);
		break;
	case KOP_FOUND_INF:
		k->found_inf(&kop->found_inf, begin, end);
		break;
	case KOP_FILL:
		k->fill(&kop->fill, begin, end);
		break;
	case KOP_PACK:
		k->pack(&kop->pack, begin, end);
		break;
	case KOP_COPY:
		k->copy(&kop->copy, begin, end);
		break;
	case KOP_CLAMP:
		k->clamp(&kop->clamp, begin, end);
		break;
	case KOP_UNSCALE:
		k->unscale(&kop->unscale, begin, end);
		break;
	case KOP_ADD_ROWS:
		k->add_rows(&kop->add_rows, begin, end);
		break;
	case _KOP_N:
		CHECK(kop->kind != _KOP_N);
	}
}
