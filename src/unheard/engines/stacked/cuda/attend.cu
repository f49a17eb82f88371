// The softmax of one user over one split of the words, for all N positions. D must be a multiple of 32, and N of 16.
//
// A warp handles 16 positions. The block processes tiles of WORDS words. It computes the word vectors of a tile in
// shared memory, four threads per word, and copies the next tile while the products of the current tile run. In the
// first local step all users of a run have the same word vectors, so `form_vectors` computes them once per run. The
// softmax keeps a running maximum over tiles, as attention kernels do (Milakov and Gimelshein 2018, Dao et al. 2022).
// Grid: (SPLITS, U). Block: 2 * N threads.
// Compile-time constants: P, AT, LAYER, M, V, D, N, UNIT (as in table_kernels.py), SPLITS, WORDS, BLOCKS_PER_SM, FRESH.
// `attend` in table_kernels.py computes the same in Triton.

#define LOG2_E 1.4426950408889634f
#define ROW_BYTES (2 * D)
#define BLOCKS (D / 32)
#define STEPS (WORDS / 16)
#define TILE_BYTES (WORDS * ROW_BYTES)
#define THREADS (2 * N)
#define STAGES 4                       // tiles in shared memory; without FRESH two of them hold delta and theta0

// The place of a piece of 16 bytes in a row of word vectors in shared memory. The order differs between rows, so that
// the eight rows of a matrix lie in different banks.
INLINE int piece_at(int row, int piece) { return (piece & ~3) | ((piece ^ (row >> 1)) & 3); }

// Computes theta0 + c * delta for a quarter of a word vector. Returns 1 / norm of the whole vector if UNIT, else 1.
INLINE float form_row(float (&w)[BLOCKS][8], const Quad (&start)[BLOCKS], const Quad (&change)[BLOCKS], float c) {
    float sum = 0.0f, factor = 1.0f;
#pragma unroll
    for (int k = 0; k < BLOCKS; k++) {
        const u32 a[4] = {start[k].x, start[k].y, start[k].z, start[k].w};
        const u32 b[4] = {change[k].x, change[k].y, change[k].z, change[k].w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w[k][2 * i] = FRESH ? low(a[i]) : low(a[i]) + c * low(b[i]);
            w[k][2 * i + 1] = FRESH ? high(a[i]) : high(a[i]) + c * high(b[i]);
            sum += w[k][2 * i] * w[k][2 * i];
            sum += w[k][2 * i + 1] * w[k][2 * i + 1];
        }
    }
    if (UNIT) {
        sum += exchange(sum, 1);
        sum += exchange(sum, 2);
        factor = 1.0f / square_root(sum > 1e-24f ? sum : 1e-24f);
    }
    return factor;
}
INLINE Quad packed(const float (&w)[8], float factor) {
    return Quad{pack(w[0] * factor, w[1] * factor), pack(w[2] * factor, w[3] * factor),
                pack(w[4] * factor, w[5] * factor), pack(w[6] * factor, w[7] * factor)};
}

// Computes the word vectors of each run, [R, rows, D], in the order of `piece_at`, and 1 / norm of each, [R, rows].
// `rows` is V rounded up to a multiple of WORDS and of 16; the vectors from word V on are zero.
// Grid: (rows / 16, R). Block: 64 threads.
KERNEL __launch_bounds__(64) form_vectors(
    const bf16* theta0, bf16* vectors, float* inverse, int rows
) {
    const int word = blockIdx.x * 16 + (threadIdx.x >> 2), q = threadIdx.x & 3, r = blockIdx.y;
    Quad start[BLOCKS];
    const Quad change[BLOCKS] = {};
    float w[BLOCKS][8];
#pragma unroll
    for (int k = 0; k < BLOCKS; k++)
        start[k] = word < V ? load_kept(theta0 + (i64)r * P + AT + (i64)word * D + q * 8 + 32 * k) : Quad{0, 0, 0, 0};
    const float factor = form_row(w, start, change, 0.0f);
    if (word >= rows) return;
    bf16* to = vectors + ((i64)r * rows + word) * D;
#pragma unroll
    for (int k = 0; k < BLOCKS; k++) *(Quad*)(to + 8 * piece_at(word, 4 * k + q)) = packed(w[k], factor);
    if (q == 0) inverse[(i64)r * rows + word] = factor;
}

// Computes the word vectors of a tile from its delta and theta0, which are in shared memory.
INLINE void form_tile(u32 deltas, u32 starts, unsigned char* to, float c, int words) {
    // Threads without a word do not return early: all threads of a warp must take part in the exchange of norms.
#pragma unroll
    for (int pass = 0; pass < (4 * WORDS + THREADS - 1) / THREADS; pass++) {
        const int row = pass * (THREADS / 4) + (threadIdx.x >> 2), q = threadIdx.x & 3;
        Quad start[BLOCKS] = {}, change[BLOCKS] = {};
        float w[BLOCKS][8];
#pragma unroll
        for (int k = 0; k < BLOCKS; k++)
            if (row < words) {
                start[k] = load_shared(starts + row * ROW_BYTES + 64 * k + 16 * q);
                change[k] = load_shared(deltas + row * ROW_BYTES + 64 * k + 16 * q);
            }
        const float factor = form_row(w, start, change, c);
#pragma unroll
        for (int k = 0; k < BLOCKS; k++)
            if (row < WORDS) *(Quad*)(to + row * ROW_BYTES + 16 * piece_at(row, 4 * k + q)) = packed(w[k], factor);
    }
}

KERNEL __launch_bounds__(2 * N, BLOCKS_PER_SM) attend_words(
    const bf16* delta, const bf16* theta0, const float* scale, const int* run, const int* step, const int* num_steps,
    const bf16* vectors, int rows, const bf16* output, float* part_sum, float* part_peak, float* part_total
) {
    SHARED_MEMORY(memory);
    const int split = blockIdx.x, u = blockIdx.y;
    if (step[0] >= num_steps[u]) return;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const bf16* of_delta = delta + (i64)u * P + AT;
    const bf16* of_start = theta0 + (i64)run[u] * P + AT;
    const bf16* of_vectors = vectors + (i64)run[u] * rows * D;
    const float c = scale[u * M + LAYER];
    const int tiles = (V + WORDS - 1) / WORDS, each = (tiles + SPLITS - 1) / SPLITS;
    const int first = split * each, end = first + each < tiles ? first + each : tiles;
    const u32 shared = shared_address(memory), mbarriers = shared + STAGES * TILE_BYTES;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int s = 0; s < STAGES; s++) init_mbarrier(mbarriers + 8 * s);
        fence_mbarrier_init();
    }
    block_barrier();

    // One thread starts the copies. With FRESH a tile of finished word vectors goes to the next of STAGES places;
    // otherwise delta and theta0 of the next tile go to the last two places.
    const auto copy_tile = [&](int tile) {
        if (threadIdx.x || tile >= end) return;
        const int stage = FRESH ? (tile - first) % STAGES : 0, left = V - tile * WORDS;
        const u32 bytes = (FRESH || left > WORDS ? WORDS : left) * ROW_BYTES, mbarrier = mbarriers + 8 * stage;
        if (FRESH) {
            expect_bytes(mbarrier, bytes);
            copy_bulk(shared + stage * TILE_BYTES, of_vectors + (i64)tile * WORDS * D, bytes, mbarrier);
        } else {
            expect_bytes(mbarrier, 2 * bytes);
            copy_bulk(shared + 2 * TILE_BYTES, of_delta + (i64)tile * WORDS * D, bytes, mbarrier);
            copy_bulk(shared + 3 * TILE_BYTES, of_start + (i64)tile * WORDS * D, bytes, mbarrier);
        }
    };
    const auto form = [&](int tile) {
        if (FRESH || tile >= end) return;
        const int left = V - tile * WORDS, count = tile - first;
        wait_mbarrier(mbarriers, count & 1);
        form_tile(shared + 2 * TILE_BYTES, shared + 3 * TILE_BYTES, memory + (count & 1) * TILE_BYTES, c, left < WORDS ? left : WORDS);
    };
#pragma unroll
    for (int s = 0; s < (FRESH ? STAGES : 1); s++) copy_tile(first + s);

    u32 o[2 * BLOCKS][4];
    const u32* of_output = (const u32*)(output + ((i64)u * N + warp * 16 + g) * D) + q;
#pragma unroll
    for (int s = 0; s < 2 * BLOCKS; s++)
#pragma unroll
        for (int k = 0; k < 4; k++) o[s][k] = of_output[(k & 1) * 4 * D + s * 8 + (k >> 1) * 4];
    float summed[4 * BLOCKS][4] = {}, peak[2] = {-1e30f, -1e30f}, total[2] = {0.0f, 0.0f};
    // The addresses of this lane's rows for load_matrices, rows 8 j + (lane & 7), and for load_transposed, rows
    // 16 s + (lane & 15), with the order of `piece_at`.
    const u32 by_word = (lane & 7) * ROW_BYTES + (((lane >> 3) ^ (lane >> 1)) & 3) * 16;
    const u32 by_column = (lane & 15) * ROW_BYTES;
    const int column_piece = (lane >> 4) ^ ((lane >> 1) & 3);

    form(first);
    block_barrier();
#pragma unroll 1
    for (int tile = first; tile < end; tile++) {
        const int count = tile - first;
        const u32 here = shared + (FRESH ? count % STAGES : count & 1) * TILE_BYTES;
        if (FRESH) wait_mbarrier(mbarriers + 8 * (count % STAGES), (count / STAGES) & 1);
        else copy_tile(tile + 1);
        float logit[2 * STEPS][4] = {};
#pragma unroll
        for (int k = 0; k < BLOCKS; k++)
#pragma unroll
            for (int j = 0; j < 2 * STEPS; j += 2) {
                u32 w[2][4];
                load_matrices(w[0], here + by_word + 8 * j * ROW_BYTES + k * 64);
                load_matrices(w[1], here + by_word + 8 * (j + 1) * ROW_BYTES + k * 64);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    multiply_add(logit[j], o[2 * k + half], w[0][2 * half], w[0][2 * half + 1]);
                    multiply_add(logit[j + 1], o[2 * k + half], w[1][2 * half], w[1][2 * half + 1]);
                }
            }
        if ((tile + 1) * WORDS > V) {
#pragma unroll
            for (int j = 0; j < 2 * STEPS; j++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (tile * WORDS + 8 * j + 2 * q + (i & 1) >= V) logit[j][i] = -1e30f;
        }
        float fade[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float highest = -1e30f;
#pragma unroll
            for (int j = 0; j < 2 * STEPS; j++) highest = larger(highest, larger(logit[j][2 * r], logit[j][2 * r + 1]));
            highest = larger(highest, exchange(highest, 1));
            highest = larger(peak[r], larger(highest, exchange(highest, 2)) * LOG2_E);
            fade[r] = exp2_(peak[r] - highest);
            peak[r] = highest;
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < 2 * STEPS; j++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    logit[j][2 * r + i] = exp2_(logit[j][2 * r + i] * LOG2_E - highest);
                    sum += logit[j][2 * r + i];
                }
            total[r] = total[r] * fade[r] + sum;
        }
        if (any_lane(fade[0] < 1.0f || fade[1] < 1.0f)) {
#pragma unroll
            for (int j = 0; j < 4 * BLOCKS; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) summed[j][i] *= fade[i >> 1];
        }
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const u32 p[4] = {pack(logit[2 * s][0], logit[2 * s][1]), pack(logit[2 * s][2], logit[2 * s][3]),
                              pack(logit[2 * s + 1][0], logit[2 * s + 1][1]), pack(logit[2 * s + 1][2], logit[2 * s + 1][3])};
#pragma unroll
            for (int j = 0; j < 4 * BLOCKS; j += 2) {
                u32 w[4];
                load_transposed(w, here + by_column + 16 * s * ROW_BYTES + (j >> 2) * 64 + (column_piece ^ (j & 2)) * 16);
                multiply_add(summed[j], p, w[0], w[1]);
                multiply_add(summed[j + 1], p, w[2], w[3]);
            }
        }
        form(tile + 1);
        block_barrier();
        if (FRESH) copy_tile(tile + STAGES);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        total[r] += exchange(total[r], 1);
        total[r] += exchange(total[r], 2);
        const i64 at = ((i64)u * SPLITS + split) * N + warp * 16 + 8 * r + g;
        if (q == 0) {
            part_peak[at] = peak[r] / LOG2_E;
            part_total[at] = total[r];
        }
#pragma unroll
        for (int j = 0; j < 4 * BLOCKS; j++) {
            part_sum[at * D + 8 * j + 2 * q] = summed[j][2 * r];
            part_sum[at * D + 8 * j + 2 * q + 1] = summed[j][2 * r + 1];
        }
    }
}
