/* Moves blocks between a file and one buffer with io_uring, so many in flight, from one thread.

       io_uring FILE BLOCK_BYTES BLOCKS DEPTH r|w|b

   b reads the first half of the blocks while it writes the second. Prints seconds, and processor seconds. No library:
   the three system calls, and the two rings that the kernel shares. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/io_uring.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static double processor(void) {
    struct rusage r;
    getrusage(RUSAGE_SELF, &r);
    return r.ru_utime.tv_sec + r.ru_stime.tv_sec + (r.ru_utime.tv_usec + r.ru_stime.tv_usec) * 1e-6;
}

static void fail(const char *what) {
    perror(what);
    exit(1);
}

int main(int argc, char **argv) {
    if (argc != 6) return fprintf(stderr, "io_uring FILE BLOCK_BYTES BLOCKS DEPTH r|w|b\n"), 2;
    size_t block = strtoull(argv[2], 0, 10), blocks = strtoull(argv[3], 0, 10), depth = strtoull(argv[4], 0, 10);
    char what = argv[5][0];
    int file = open(argv[1], O_RDWR | O_DIRECT);
    if (file < 0) fail(argv[1]);
    char *buffer = mmap(0, depth * block, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (buffer == MAP_FAILED) fail("mmap");
    madvise(buffer, depth * block, MADV_HUGEPAGE);
    for (size_t at = 0; at < depth * block; at += 8) *(uint64_t *)(buffer + at) = at * 0x9E3779B97F4A7C15u;

    struct io_uring_params p = {0};
    int ring = syscall(__NR_io_uring_setup, depth, &p);
    if (ring < 0) fail("io_uring_setup");
    char *sq = mmap(0, p.sq_off.array + p.sq_entries * 4, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring,
                    IORING_OFF_SQ_RING);
    char *cq = mmap(0, p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe), PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_POPULATE, ring, IORING_OFF_CQ_RING);
    struct io_uring_sqe *sqes = mmap(0, p.sq_entries * sizeof *sqes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE,
                                     ring, IORING_OFF_SQES);
    if (sq == MAP_FAILED || cq == MAP_FAILED || (void *)sqes == MAP_FAILED) fail("mmap of the rings");
    unsigned *sq_tail = (unsigned *)(sq + p.sq_off.tail), *sq_array = (unsigned *)(sq + p.sq_off.array);
    unsigned sq_mask = *(unsigned *)(sq + p.sq_off.ring_mask), cq_mask = *(unsigned *)(cq + p.cq_off.ring_mask);
    unsigned *cq_head = (unsigned *)(cq + p.cq_off.head), *cq_tail = (unsigned *)(cq + p.cq_off.tail);
    struct io_uring_cqe *cqes = (struct io_uring_cqe *)(cq + p.cq_off.cqes);

    struct iovec whole = {buffer, depth * block};
    if (syscall(__NR_io_uring_register, ring, IORING_REGISTER_BUFFERS, &whole, 1) < 0) fail("io_uring_register");

    double began = now(), cpu = processor();
    size_t sent = 0, done = 0;
    unsigned slots[1024], free_slots = 0;
    for (unsigned slot = 0; slot < depth && slot < 1024; slot++) slots[free_slots++] = slot;
    while (done < blocks) {
        unsigned more = 0;
        while (free_slots && sent < blocks) {
            unsigned slot = slots[--free_slots], tail = *sq_tail;
            size_t at = what == 'b' ? (sent % 2) * (blocks / 2) + sent / 2 : sent;
            struct io_uring_sqe *sqe = &sqes[tail & sq_mask];
            memset(sqe, 0, sizeof *sqe);
            sqe->opcode = (what == 'r' || (what == 'b' && sent % 2 == 0)) ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
            sqe->fd = file;
            sqe->addr = (uint64_t)(buffer + slot * block);
            sqe->len = block;
            sqe->off = at * block;
            sqe->user_data = slot;
            sq_array[tail & sq_mask] = tail & sq_mask;
            __atomic_store_n(sq_tail, tail + 1, __ATOMIC_RELEASE);
            sent++, more++;
        }
        if (syscall(__NR_io_uring_enter, ring, more, 1, IORING_ENTER_GETEVENTS, 0, 0) < 0) fail("io_uring_enter");
        unsigned head = *cq_head;
        for (; head != __atomic_load_n(cq_tail, __ATOMIC_ACQUIRE); head++, done++) {
            struct io_uring_cqe *cqe = &cqes[head & cq_mask];
            if (cqe->res != (int)block) return fprintf(stderr, "moved %d bytes of %zu\n", cqe->res, block), 1;
            slots[free_slots++] = cqe->user_data;
        }
        __atomic_store_n(cq_head, head, __ATOMIC_RELEASE);
    }
    printf("%f %f\n", now() - began, processor() - cpu);
    return 0;
}
