/*
 * A tool of NVTX, as Nsight Systems is one: test_nvtx.py names it in NVTX_INJECTION64_PATH, and the daemon loads it. It
 * appends a line for each range to the file that NVTX_TOOL_FILE names: "THREAD push DOMAIN LAUNCHES NAME", "THREAD pop DOMAIN".
 */
#include <nvtx3/nvToolsExt.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static FILE *file;

/* A domain is its name. */
static nvtxDomainHandle_t nvtxtool_create(const char *name)
{
	fprintf(file, "%ld domain %s\n", syscall(SYS_gettid), name);
	return (nvtxDomainHandle_t)(uintptr_t)name;
}

static int nvtxtool_push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t *e)
{
	fprintf(file, "%ld push %s %u %s\n", syscall(SYS_gettid), (const char *)domain,
		e->payload.uiValue,
		e->messageType == NVTX_MESSAGE_TYPE_ASCII ? e->message.ascii : "?");
	return 0;
}

static int nvtxtool_pop(nvtxDomainHandle_t domain)
{
	fprintf(file, "%ld pop %s\n", syscall(SYS_gettid), (const char *)domain);
	return 0;
}

__attribute__((visibility("default"))) int InitializeInjectionNvtx2(
	NvtxGetExportTableFunc_t get_table);

int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_table)
{
	const NvtxExportTableCallbacks *callbacks = get_table(NVTX_ETID_CALLBACKS);
	const char *path = getenv("NVTX_TOOL_FILE");
	NvtxFunctionTable table;
	unsigned n = 0;

	if (!callbacks || !path ||
	    !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &n) ||
	    n <= NVTX_CBID_CORE2_DomainCreateA)
		return 0;
	file = fopen(path, "ae");
	if (!file)
		return 0;
	setvbuf(file, NULL, _IOLBF, 0);
	*table[NVTX_CBID_CORE2_DomainCreateA] = (NvtxFunctionPointer)nvtxtool_create;
	*table[NVTX_CBID_CORE2_DomainRangePushEx] = (NvtxFunctionPointer)nvtxtool_push;
	*table[NVTX_CBID_CORE2_DomainRangePop] = (NvtxFunctionPointer)nvtxtool_pop;
	return 1;
}
