// The update of a word table of one user, delta <- c * keep * delta - eta * gradient, for D and N that are multiples of
// 32 and 16.
//
// A warp takes 16 * TILES words at a time. The numbers of a word stay in the registers of four threads from reading to
// writing: thread q has the columns 32 k + 8 q to + 7 of rows g and g + 8, which are both the first factor of the logits'
// product and, because the outputs' columns are put into shared memory in the same order, its place in the
// gradient. Grid: (SLICES, U). Block: 32 * WARPS threads.
// Compile-time constants: P, AT, LAYER, M, SLOTS, SLOT, V, D, N, UNIT, SLICES, WARPS, TILES (stacked/__init__.py).
// table_kernels.py computes the same in Triton.

#define LOG2_E 1.4426950408889634f
#define ROW_BYTES (2 * D + 16)       // of the outputs in shared memory; 16 more against bank conflicts
#define BLOCKS (D / 32)
#define STEPS (N / 16)
#define COPIES (TILES * 4 * BLOCKS * 32 * WARPS * 16)   // bytes: the next words of each warp, delta and theta0

// Starts to copy the words of a thread into places of shared memory that only it uses.
INLINE void copy_words(u32 to, const bf16* delta, const bf16* theta0, int word0, int g, int q) {
#pragma unroll
    for (int part = 0; part < 2 * TILES; part++) {
        const int word = word0 + 8 * part + g, safe = word < V ? word : V - 1;
        const i64 from = (i64)safe * D + q * 8;
#pragma unroll
        for (int k = 0; k < BLOCKS; k++) {
            copy_16(to + (part * BLOCKS + k) * 2 * 32 * WARPS * 16, delta + from + 32 * k);
            copy_16(to + ((part * BLOCKS + k) * 2 + 1) * 32 * WARPS * 16, theta0 + from + 32 * k);
        }
    }
    end_copies();
}

KERNEL __launch_bounds__(32 * WARPS, BLOCKS_PER_SM) update_table_dense(
    bf16* delta, const bf16* theta0, const float* scale, const int* run, const int* step, const int* num_steps,
    const float* rate, const float* keep, const int* targets, const float* share, const bf16* output,
    const float* log_sum, float* squares, int U
) {
    SHARED_MEMORY(memory);
    const int u = blockIdx.y, now = step[0];
    if (now >= num_steps[u]) return;
    unsigned char* of_outputs = memory + COPIES;
    float* lse = (float*)(of_outputs + N * ROW_BYTES);
    int* target = (int*)(lse + N);
    float* parts = (float*)(target + N);
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const u32 outputs = shared_address(of_outputs), copies = shared_address(memory) + threadIdx.x * 16;
    const i64 of_run = run[u];
    const float c = scale[u * M + LAYER], left = c * keep[of_run];
    const float eta = rate[of_run] * share[(i64)now * U + u];

    const int words = 16 * TILES, tiles = (V + words - 1) / words, each = (tiles + SLICES - 1) / SLICES;
    const int first = blockIdx.x * each, end = first + each < tiles ? first + each : tiles;
    bf16* of_delta = delta + (i64)u * P + AT;
    const bf16* of_start = theta0 + of_run * P + AT;
    if (first + warp < end) copy_words(copies, of_delta, of_start, (first + warp) * words, g, q);
    for (int piece = threadIdx.x; piece < N * (D / 8); piece += 32 * WARPS) {
        const int n = piece / (D / 8), chunk = piece % (D / 8);
        const Quad v = load_kept(output + ((i64)u * N + n) * D + chunk * 8);
        u32* to = (u32*)(of_outputs + n * ROW_BYTES) + (chunk >> 2) * 16 + (chunk & 3);
        to[0] = v.x;
        to[4] = v.y;
        to[8] = v.z;
        to[12] = v.w;
    }
    for (int n = threadIdx.x; n < N; n += 32 * WARPS) {
        const int word = targets[((i64)now * U + u) * N + n];
        target[n] = word;
        // At positions without a target the sum is infinite, so that every probability is 0.
        lse[n] = word >= 0 ? log_sum[(i64)u * N + n] * LOG2_E : 1e30f;
    }
    block_barrier();
    int mine[(N + 31) / 32];
#pragma unroll
    for (int k = 0; k < (N + 31) / 32; k++) mine[k] = 32 * k + lane < N ? target[32 * k + lane] : -1;

    const u32 rows = outputs + (lane & 7) * ROW_BYTES + (lane >> 3) * 16;              // four blocks of columns
    const u32 columns = outputs + (lane & 15) * ROW_BYTES + (lane >> 4) * 16;          // two blocks of 8 positions, two of columns
    float square = 0.0f;

#pragma unroll 1
    for (int tile = first + warp; tile < end; tile += WARPS) {
        const int word0 = tile * words;
        Quad old[TILES][2][BLOCKS];
        u32 vector[TILES][2 * BLOCKS][4];
        float inverse[TILES][2], outward[TILES][2];
        await_copies<0>();
#pragma unroll
        for (int m = 0; m < TILES; m++) {
            Quad start[2][BLOCKS];
#pragma unroll
            for (int r = 0; r < 2; r++)
#pragma unroll
                for (int k = 0; k < BLOCKS; k++) {
                    const int part = (2 * m + r) * BLOCKS + k;
                    old[m][r][k] = load_shared(copies + part * 2 * 32 * WARPS * 16);
                    start[r][k] = load_shared(copies + (part * 2 + 1) * 32 * WARPS * 16);
                }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float w[BLOCKS][8], sum = 0.0f;
#pragma unroll
                for (int k = 0; k < BLOCKS; k++) {
                    const u32 a[4] = {start[r][k].x, start[r][k].y, start[r][k].z, start[r][k].w};
                    const u32 b[4] = {old[m][r][k].x, old[m][r][k].y, old[m][r][k].z, old[m][r][k].w};
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        w[k][2 * i] = low(a[i]) + c * low(b[i]);
                        w[k][2 * i + 1] = high(a[i]) + c * high(b[i]);
                        sum += w[k][2 * i] * w[k][2 * i];
                        sum += w[k][2 * i + 1] * w[k][2 * i + 1];
                    }
                }
                float factor = 1.0f;
                if (UNIT) {
                    sum += exchange(sum, 1);
                    sum += exchange(sum, 2);
                    factor = 1.0f / square_root(sum > 1e-24f ? sum : 1e-24f);
                }
                inverse[m][r] = factor;
                outward[m][r] = 0.0f;
#pragma unroll
                for (int k = 0; k < BLOCKS; k++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        vector[m][2 * k + (i >> 1)][r + 2 * (i & 1)] = pack(w[k][2 * i] * factor, w[k][2 * i + 1] * factor);
            }
        }
        if (tile + WARPS < end) copy_words(copies, of_delta, of_start, (tile + WARPS) * words, g, q);
        bool here = false;
#pragma unroll
        for (int k = 0; k < (N + 31) / 32; k++) here |= (u32)(mine[k] - word0) < (u32)words;
        const bool any = any_lane(here);

        // The softmax's gradient of 16 positions at a time: the first factor of the gradient's product.
        float logits[TILES][2 * STEPS][4] = {};
#pragma unroll
        for (int k = 0; k < BLOCKS; k++)
#pragma unroll
            for (int j = 0; j < 2 * STEPS; j += 2) {
                u32 o[2][4];
                load_matrices(o[0], rows + 8 * j * ROW_BYTES + k * 64);
                load_matrices(o[1], rows + 8 * (j + 1) * ROW_BYTES + k * 64);
#pragma unroll
                for (int half = 0; half < 2; half++)
#pragma unroll
                    for (int m = 0; m < TILES; m++) {
                        multiply_add(logits[m][j], vector[m][2 * k + half], o[0][2 * half], o[0][2 * half + 1]);
                        multiply_add(logits[m][j + 1], vector[m][2 * k + half], o[1][2 * half], o[1][2 * half + 1]);
                    }
            }
        u32 dlogit[TILES][STEPS][4];
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int n = 16 * s + 8 * j + 2 * q;
                const float lse0 = lse[n], lse1 = lse[n + 1];
#pragma unroll
                for (int m = 0; m < TILES; m++)
#pragma unroll
                    for (int r = 0; r < 2; r++) {
                        const float z0 = logits[m][2 * s + j][2 * r], z1 = logits[m][2 * s + j][2 * r + 1];
                        float p0 = exp2_(z0 * LOG2_E - lse0), p1 = exp2_(z1 * LOG2_E - lse1);
                        if (any) {
                            const int word = word0 + 16 * m + 8 * r + g;
                            if (target[n] == word) p0 -= 1.0f;
                            if (target[n + 1] == word) p1 -= 1.0f;
                        }
                        outward[m][r] += p0 * z0;
                        outward[m][r] += p1 * z1;
                        dlogit[m][s][r + 2 * j] = pack(p0, p1);
                    }
            }
        }
        float pace[TILES][2];
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
            for (int r = 0; r < 2; r++) {
                outward[m][r] += exchange(outward[m][r], 1);
                outward[m][r] += exchange(outward[m][r], 2);
                pace[m][r] = eta * inverse[m][r];
                outward[m][r] = UNIT ? outward[m][r] * pace[m][r] : 0.0f;
            }
#pragma unroll
        for (int k = 0; k < BLOCKS; k++) {
            float gradient[TILES][4][4] = {};
#pragma unroll
            for (int s = 0; s < STEPS; s++)
#pragma unroll
                for (int j = 0; j < 4; j += 2) {
                    u32 o[4];
                    load_transposed(o, columns + 16 * s * ROW_BYTES + k * 64 + j * 16);
#pragma unroll
                    for (int m = 0; m < TILES; m++) {
                        multiply_add(gradient[m][j], dlogit[m][s], o[0], o[1]);
                        multiply_add(gradient[m][j + 1], dlogit[m][s], o[2], o[3]);
                    }
                }
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const u32 b[4] = {old[m][r][k].x, old[m][r][k].y, old[m][r][k].z, old[m][r][k].w};
                    u32 stored[4];
                    float sum = 0.0f;
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const u32 w = vector[m][2 * k + (i >> 1)][r + 2 * (i & 1)];
                        const float* d = gradient[m][i];
                        stored[i] = pack(left * low(b[i]) - pace[m][r] * d[2 * r] + outward[m][r] * low(w),
                                         left * high(b[i]) - pace[m][r] * d[2 * r + 1] + outward[m][r] * high(w));
                        sum += low(stored[i]) * low(stored[i]);
                        sum += high(stored[i]) * high(stored[i]);
                    }
                    const int word = word0 + 16 * m + 8 * r + g;
                    if (word < V) {
                        *(Quad*)(of_delta + (i64)word * D + q * 8 + 32 * k) = Quad{stored[0], stored[1], stored[2], stored[3]};
                        square += sum;
                    }
                }
        }
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) square += exchange(square, lanes);
    if (lane == 0) parts[warp] = square;
    block_barrier();
    if (threadIdx.x == 0) {
        float total = 0.0f;
        for (int k = 0; k < WARPS; k++) total += parts[k];
        squares[(i64)u * SLOTS + SLOT + blockIdx.x] = total;
    }
}
