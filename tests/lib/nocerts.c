/*
 * Criterion has libgit2 for its patterns, and libgit2 reads and parses all certificates of CAs that the
 * machine has, with mbed TLS, in each process of a test: half of the time of a short one. Nothing here
 * uses mbed TLS. So the programs of tests define these two themselves, for all that they load, and no
 * certificate is read.
 */
#define NOCERTS_SEEN __attribute__((visibility("default")))

NOCERTS_SEEN int mbedtls_x509_crt_parse_file(void *chain, const char *path);
NOCERTS_SEEN int mbedtls_x509_crt_parse_path(void *chain, const char *path);

/* Return: 0: all are parsed. */
int mbedtls_x509_crt_parse_file(void *chain, const char *path)
{
	(void)chain;
	(void)path;
	return 0;
}

int mbedtls_x509_crt_parse_path(void *chain, const char *path)
{
	(void)chain;
	(void)path;
	return 0;
}
