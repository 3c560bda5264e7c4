#include "core/memfile.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "core/cleanup.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U /* Linux 6.3 */
#endif

int memfile_new(const char *name, int *ret_fd)
{
	const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
	_cleanup_(fd_closep) int fd = memfd_create(name, flags | MFD_NOEXEC_SEAL);

	if (fd < 0 && errno == EINVAL)
		fd = memfd_create(name, flags);
	if (fd < 0 || fchmod(fd, 0600) < 0)
		return -errno;
	*ret_fd = STEAL_FD(fd);
	return 0;
}
