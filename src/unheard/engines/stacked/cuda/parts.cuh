// Functions that several CUDA kernels use: bfloat16 pairs, matrix products of a warp, copies, and clusters of blocks.
//
// Every source has the compile-time constant FRESH. It is 1 for the first local step, in which every delta is zero. The
// kernels do not read delta then, because its memory still holds the data of other users.
//
// A "pair" is two bfloat16 numbers in one 32-bit word, the first in the lower half. In a warp, `g` = lane / 4 and `q` =
// lane % 4 are the coordinates that the matrix instructions use (PTX manual, "Matrix fragments for mma.m16n8k16"). The
// tests compile the kernels for a CPU; tests/cuda_on_cpu.h then replaces the functions between #ifndef ON_CPU and
// #endif.

typedef unsigned int u32;
typedef unsigned short bf16;
typedef long long i64;

#ifndef ON_CPU  // DEVICE_ONLY
#define INLINE __device__ __forceinline__
#define KERNEL extern "C" __global__ void
#define IN_CLUSTERS __cluster_dims__(4, 1, 1)
#define SHARED_MEMORY(name) extern __shared__ __align__(128) unsigned char name[]

struct __align__(16) Quad { u32 x, y, z, w; };

INLINE float low(u32 pair) { return __uint_as_float(pair << 16); }
INLINE float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
INLINE u32 pack(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
INLINE float exp2_(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
INLINE float reciprocal(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
INLINE float square_root(float x) { return sqrtf(x); }
INLINE float larger(float x, float y) { return fmaxf(x, y); }
INLINE float exchange(float x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }
INLINE double exchange(double x, int lanes) { return __shfl_xor_sync(0xffffffffu, x, lanes); }
INLINE bool any_lane(bool x) { return __any_sync(0xffffffffu, x); }
INLINE void block_barrier() { __syncthreads(); }
INLINE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Computes c [16, 8] += a [16, 16] b [16, 8] in a warp.
INLINE void multiply_add(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
INLINE void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
INLINE void load_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
        : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
INLINE Quad load_shared(u32 address) {
    Quad v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}
INLINE void copy_16(u32 shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
INLINE void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> INLINE void await_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
INLINE Quad load_once(const void* p) {
    Quad v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
INLINE Quad load_kept(const void* p) {
    Quad v;
    asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
INLINE u32 in_block(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
INLINE u32 from_lane(u32 x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
INLINE void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
INLINE void warp_barrier() { __syncwarp(); }

// An mbarrier in shared memory counts the bytes of one message at a time. One thread sets the number of bytes of the
// next message (`expect_bytes`); `wait_mbarrier` returns when they have arrived. Message k of an mbarrier has the
// parity k & 1.
INLINE void init_mbarrier(u32 mbarrier) { asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(mbarrier) : "memory"); }
INLINE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
INLINE void expect_bytes(u32 mbarrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(mbarrier), "r"(bytes) : "memory");
}
INLINE void wait_mbarrier(u32 mbarrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
            : "=r"(done) : "r"(mbarrier), "r"(parity) : "memory");
    } while (!done);
}
// Sends 16 (or 8) bytes to an address in the shared memory of a block of the cluster. An mbarrier of that block counts
// them.
INLINE void store_async(u32 address, Quad v, u32 mbarrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];"
        ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(mbarrier) : "memory");
}
INLINE void store_async(u32 address, float x, float y, u32 mbarrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];"
        ::"r"(address), "f"(x), "f"(y), "r"(mbarrier) : "memory");
}
// Copies a multiple of 16 bytes from global to shared memory; the mbarrier counts them. Only one thread calls it.
INLINE void copy_bulk(u32 shared, const void* global, u32 bytes, u32 mbarrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(shared), "l"(global), "r"(bytes), "r"(mbarrier) : "memory");
}
#endif  // DEVICE_ONLY

INLINE float sigmoid(float x) { return reciprocal(1.0f + exp2_(-1.4426950408889634f * x)); }
INLINE float tanh_(float x) { return 2.0f * sigmoid(2.0f * x) - 1.0f; }
// Returns theta0 + c * delta for a pair.
INLINE u32 moved(u32 start, u32 delta, float c) {
    return pack(low(start) + c * low(delta), high(start) + c * high(delta));
}

// After a matrix product, a thread has the rows r0 and r1 of one column, g. The lanes of neighbouring columns differ by
// 4. `paired` exchanges values between them: a thread then has two neighbouring columns of one row, of row r0 if g is
// even and of row r1 if g is odd. `unpaired` is the inverse.
INLINE u32 paired(float r0, float r1, bool odd) {
    float other = exchange(odd ? r0 : r1, 4);
    return odd ? pack(other, r1) : pack(r0, other);
}
INLINE void unpaired(u32 pair, bool odd, float& r0, float& r1) {
    float other = exchange(odd ? low(pair) : high(pair), 4);
    r0 = odd ? other : low(pair);
    r1 = odd ? high(pair) : other;
}
// Returns all eight columns of the thread's row, in order, from the pairs that `paired` returned.
INLINE Quad gathered(u32 pair, int lane) {
    const int first = lane & 7;  // the lane with the first two columns
    return Quad{from_lane(pair, first), from_lane(pair, first + 8), from_lane(pair, first + 16), from_lane(pair, first + 24)};
}
