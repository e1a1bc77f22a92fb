/* What the files of the stand-in for CUDA's runtime share. */
#ifndef ACCOUNT
#define ACCOUNT

/* One process on one device. Read from outside: tests/nullcuda/accounts.py has the same layout. */
typedef struct {
    int pid, device;
    long bytes, peak, launches, calls, waits, copies, opened;
} Account;

Account *take_context(void); /* of this process, which has a context from now on */
void nullcuda_called(const char *name); /* of a library: it would launch kernels of its own */
void *nullcuda_kernel(const char *name);       /* a kernel to launch */
int nullcuda_launch(const void *kernel);
#endif
