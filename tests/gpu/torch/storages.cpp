/* What PyTorch 2.13 has as UntypedStorage._swap_data_ptr_, for older ones on a machine with a GPU:
 * two storages exchange their memory, and their sizes if one of them has none. */
#include <c10/core/StorageImpl.h>

extern "C" int storages_swap(void *first, void *second)
{
	auto *a = static_cast<c10::StorageImpl *>(first), *b = static_cast<c10::StorageImpl *>(second);
	auto of_a = a->nbytes(), of_b = b->nbytes();

	if (of_a != of_b && of_a && of_b)
		return -1;
	at::DataPtr memory = a->set_data_ptr(std::move(b->mutable_data_ptr()));
	b->set_data_ptr_noswap(std::move(memory));
	a->set_nbytes(of_b);
	b->set_nbytes(of_a);
	return 0;
}
