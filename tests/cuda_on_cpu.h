// Runs the CUDA kernels of unheard/engines/stacked/cuda on a CPU, for tests: each thread of a cluster of blocks is a
// fiber, and an operation of a warp or of a block waits until all its threads have reached it.
//
// Defines what parts.cuh defines for the device. Products add in float32, exponentials are exact, copies are immediate;
// so results agree with a GPU's up to rounding, and indices, fragments and barriers are checked.
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define ON_CPU
#define INLINE static inline
#define KERNEL extern "C" void
#define IN_CLUSTERS
#define __launch_bounds__(...)
#define SHARED_MEMORY(name) unsigned char* name = self().block->memory
typedef unsigned int u32;
struct Quad { u32 x, y, z, w; };
struct Dim { int x = 0, y = 0, z = 0; };

struct Meeting { int arrived = 0; long generation = 0; };
struct Warp { Meeting meeting; float floats[32]; double doubles[32]; u32 words[32][6]; float sums[32][4]; float before[32]; u32 loaded[32][4]; };
struct Block { unsigned char* memory; Meeting meeting; std::vector<Warp> warps; };
struct Thread { jmp_buf here; Block* block; Warp* warp; int lane, rank; Dim thread, grid_block; bool begun, done; };
struct Cluster { Meeting meeting; std::vector<Block> blocks; std::vector<Thread> threads; int left; };
static Cluster* cluster;
static volatile int current;
static jmp_buf scheduler;
static Thread& self() { return cluster->threads[current]; }
#define threadIdx (self().thread)
#define blockIdx (self().grid_block)

static void pass() {
    if (!_setjmp(self().here)) _longjmp(scheduler, 1);
}
static void meet(Meeting& m, int count) {
    long generation = m.generation;
    if (++m.arrived == count) { m.arrived = 0; m.generation++; return; }
    while (m.generation == generation) pass();
}
static const u32 BLOCK_SPACE = 1u << 20;  // shared addresses: block * BLOCK_SPACE + offset
static unsigned char* at_shared(u32 address) { return cluster->blocks[address / BLOCK_SPACE].memory + address % BLOCK_SPACE; }

INLINE float as_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
INLINE u32 as_word(float x) { u32 y; memcpy(&y, &x, 4); return y; }
INLINE float low(u32 pair) { return as_float(pair << 16); }
INLINE float high(u32 pair) { return as_float(pair & 0xffff0000u); }
INLINE u32 rounded(float x) { u32 y = as_word(x); return x != x ? 0x7fffu : (y + 0x7fffu + ((y >> 16) & 1)) >> 16; }
INLINE u32 pack(float first, float second) { return rounded(first) | rounded(second) << 16; }
INLINE float exp2_(float x) { return exp2f(x); }
INLINE float reciprocal(float x) { return 1.0f / x; }
INLINE float square_root(float x) { return sqrtf(x); }
INLINE float larger(float x, float y) { return fmaxf(x, y); }
INLINE void warp_meet() { meet(self().warp->meeting, 32); }
INLINE float exchange(float x, int lanes) {
    Warp& w = *self().warp;
    w.floats[self().lane] = x;
    warp_meet();
    float y = w.floats[self().lane ^ lanes];
    warp_meet();
    return y;
}
INLINE double exchange(double x, int lanes) {
    Warp& w = *self().warp;
    w.doubles[self().lane] = x;
    warp_meet();
    double y = w.doubles[self().lane ^ lanes];
    warp_meet();
    return y;
}
INLINE bool any_lane(bool x) {
    bool y = false;
    Warp& w = *self().warp;
    w.floats[self().lane] = x;
    warp_meet();
    for (float f : w.floats) y |= f != 0;
    warp_meet();
    return y;
}
INLINE void block_barrier() { meet(self().block->meeting, 32 * self().block->warps.size()); }
INLINE void cluster_barrier() { meet(cluster->meeting, cluster->threads.size()); }
INLINE u32 shared_address(const void* p) { return self().rank * BLOCK_SPACE + ((unsigned char*)p - self().block->memory); }
INLINE u32 in_block(u32 address, u32 rank) { return rank * BLOCK_SPACE + address % BLOCK_SPACE; }
INLINE void warp_barrier() { warp_meet(); }
// The bytes that are still expected, whether `expect_bytes` was called, and the number of messages received.
struct MBarrier { int32_t bytes; int16_t expected; uint16_t received; };
INLINE MBarrier& mbarrier_at(u32 address) {
    if (address % 8) { fprintf(stderr, "misaligned mbarrier\n"); abort(); }
    return *(MBarrier*)at_shared(address);
}
INLINE void arrived(MBarrier& m, int bytes) {
    m.bytes -= bytes;
    if (m.expected && !m.bytes) { m.expected = 0; m.received++; }
}
INLINE void init_mbarrier(u32 mbarrier) { mbarrier_at(mbarrier) = MBarrier{0, 0, 0}; }
INLINE void fence_mbarrier_init() {}
INLINE void expect_bytes(u32 mbarrier, u32 bytes) {
    MBarrier& m = mbarrier_at(mbarrier);
    if (m.expected) { fprintf(stderr, "expected twice\n"); abort(); }
    m.expected = 1;
    arrived(m, -(int)bytes);
}
INLINE void wait_mbarrier(u32 mbarrier, u32 parity) {
    while ((mbarrier_at(mbarrier).received & 1) == (int)parity) pass();
}
INLINE void store_async(u32 address, Quad v, u32 mbarrier) {
    if (address % 16 || address / BLOCK_SPACE != mbarrier / BLOCK_SPACE) { fprintf(stderr, "wrong address\n"); abort(); }
    memcpy(at_shared(address), &v, 16);
    arrived(mbarrier_at(mbarrier), 16);
}
INLINE void store_async(u32 address, float x, float y, u32 mbarrier) {
    if (address % 8 || address / BLOCK_SPACE != mbarrier / BLOCK_SPACE) { fprintf(stderr, "wrong address\n"); abort(); }
    const float both[2] = {x, y};
    memcpy(at_shared(address), both, 8);
    arrived(mbarrier_at(mbarrier), 8);
}
INLINE void copy_bulk(u32 shared, const void* global, u32 bytes, u32 mbarrier) {
    if ((uintptr_t)global % 16 || shared % 16 || bytes % 16) { fprintf(stderr, "misaligned bulk copy\n"); abort(); }
    memcpy(at_shared(shared), global, bytes);
    arrived(mbarrier_at(mbarrier), bytes);
}
INLINE u32 from_lane(u32 x, int lane) {
    Warp& w = *self().warp;
    w.words[self().lane][0] = x;
    warp_meet();
    u32 y = w.words[lane][0];
    warp_meet();
    return y;
}
INLINE Quad load_shared(u32 address) { Quad v; memcpy(&v, at_shared(address), 16); return v; }
INLINE void copy_16(u32 shared, const void* global) {
    if ((uintptr_t)global % 16 || shared % 16) { fprintf(stderr, "misaligned copy\n"); abort(); }
    memcpy(at_shared(shared), global, 16);
}
INLINE void end_copies() {}
template <int LEFT> INLINE void await_copies() {}
INLINE Quad load_once(const void* p) {
    if ((uintptr_t)p % 16) { fprintf(stderr, "misaligned load\n"); abort(); }
    return *(const Quad*)p;
}
INLINE Quad load_kept(const void* p) { return load_once(p); }

INLINE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    Warp& w = *self().warp;
    const int lane = self().lane, g = lane >> 2, q = lane & 3;
    for (int k = 0; k < 4; k++) w.words[lane][k] = a[k];
    w.words[lane][4] = b0;
    w.words[lane][5] = b1;
    warp_meet();
    for (int r = 0; r < 2; r++)
        for (int n = 0; n < 2; n++) {
            float sum = 0;
            for (int k = 0; k < 16; k++) {  // A [16, 16] by rows, B [16, 8] by columns: see the PTX manual
                const u32 x = w.words[g * 4 + (k % 8) / 2][r + 2 * (k / 8)], y = w.words[(2 * q + n) * 4 + (k % 8) / 2][4 + k / 8];
                sum += (k % 2 ? high(x) : low(x)) * (k % 2 ? high(y) : low(y));
            }
            c[2 * r + n] += sum;
        }
    warp_meet();
}
INLINE void load_any(u32 (&r)[4], u32 address, bool transposed) {
    Warp& w = *self().warp;
    const int lane = self().lane, g = lane >> 2, q = lane & 3;
    if (address % 16) { fprintf(stderr, "misaligned matrix\n"); abort(); }
    w.words[lane][0] = address;
    warp_meet();
    for (int m = 0; m < 4; m++) {
        uint16_t x[2];
        for (int i = 0; i < 2; i++) {
            const int row = transposed ? 2 * q + i : g, column = transposed ? g : 2 * q + i;
            memcpy(&x[i], at_shared(w.words[8 * m + row][0]) + 2 * column, 2);
        }
        r[m] = x[0] | (u32)x[1] << 16;
    }
    warp_meet();
}
INLINE void load_matrices(u32 (&r)[4], u32 address) { load_any(r, address, false); }
INLINE void load_transposed(u32 (&r)[4], u32 address) { load_any(r, address, true); }

template <class Body> struct Launch {
    static Body* body;
    static void start() {
        (*body)();
        self().done = true;
        cluster->left--;
        _longjmp(scheduler, 1);
    }
};
template <class Body> Body* Launch<Body>::body;

// Runs `body` as a grid of blocks, `blocks` of them per cluster, one cluster after the other.
template <class Body> void launch(int grid_x, int grid_y, int blocks, int threads, int bytes, Body body) {
    const int all = blocks * threads, stack = 1 << 15;
    char* stacks = (char*)malloc((size_t)all * stack);
    unsigned char* memory = (unsigned char*)aligned_alloc(128, (size_t)blocks * BLOCK_SPACE);
    Launch<Body>::body = &body;
    for (int y = 0; y < grid_y; y++)
        for (int x = 0; x < grid_x; x += blocks) {
            Cluster here;
            cluster = &here;
            here.blocks.resize(blocks);
            here.threads.resize(all);
            here.left = all;
            for (int r = 0; r < blocks; r++) {
                here.blocks[r].memory = memory + (size_t)r * BLOCK_SPACE;
                memset(here.blocks[r].memory, 0x7f, bytes);  // what was not written is seen in the result
                here.blocks[r].warps.resize(threads / 32);
                for (int t = 0; t < threads; t++) {
                    Thread& one = here.threads[r * threads + t];
                    one.block = &here.blocks[r];
                    one.warp = &here.blocks[r].warps[t / 32];
                    one.lane = t % 32;
                    one.rank = r;
                    one.thread.x = t;
                    one.grid_block.x = x + r;
                    one.grid_block.y = y;
                    one.begun = one.done = false;
                }
            }
            while (here.left)
                for (current = 0; current < all; current++) {
                    if (self().done || _setjmp(scheduler)) continue;
                    if (self().begun) _longjmp(self().here, 1);
                    self().begun = true;
                    ucontext_t context;
                    getcontext(&context);
                    context.uc_stack.ss_sp = stacks + (size_t)current * stack;
                    context.uc_stack.ss_size = stack;
                    makecontext(&context, Launch<Body>::start, 0);
                    setcontext(&context);
                }
        }
    free(stacks);
    free(memory);
}
