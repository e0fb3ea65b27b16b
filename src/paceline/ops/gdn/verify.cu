// The rows of generated tokens through the gated delta rule on Hopper GPUs (sm_90a), for heads of 128 by 128; the mathematics
// is in ref.py.
//
// hopper.py puts before this file COLUMNS, how many columns of a state a thread has, WARPS of a CTA and CTAS, how many of these a
// multiprocessor shall have room for; RELOAD: a thread reads its rows of k once more rather than hold them. No header is included.
//
// A CTA walks the rows of one span with some columns of one head's state in registers. Eight threads of a warp share COLUMNS
// columns: each has 16 of their rows, which in every band of 32 are the four that one load of 16 bytes of k or q brings. Both
// reads of a row are of the state before it, S:
//
//     d = beta (v - e^g Sᵀk);   o = e^g Sᵀq + (k·q) d;   then S <- e^g S, rounded, and S <- S + k dᵀ, fused, as in replay
//
// so they are one walk, what decays does not wait for d, and the last row needs no new state. A sum over Dk is that of each
// thread's rows in order, then over the threads by 16, 8 and 4 lanes: the same whatever COLUMNS and WARPS are.

typedef unsigned int uint32;
typedef unsigned long long uint64;
typedef long long int64;

constexpr int DK = 128, DV = 128;
constexpr int BANDS = DK / 32;
constexpr int GROUPS = 4;                          // of columns in a warp, each with threads side by side that have the same rows
constexpr int WARP_COLUMNS = GROUPS * COLUMNS;
constexpr int CTA_COLUMNS = WARPS * WARP_COLUMNS;
constexpr int VECTOR = COLUMNS < 4 ? COLUMNS : 4;  // columns side by side, read at once
constexpr int ROWS = 8;                            // in shared memory at a time
static_assert(ROWS % WARPS == 0);
constexpr uint32 ALL = 0xffffffffu;

struct alignas(16) Gates {
    float decay, strength, overlap, unused;  // e^g, beta, k·q
};

struct Rows {
    float4 k[ROWS][DK / 4], q[ROWS][DK / 4];
    float4 v[ROWS][CTA_COLUMNS / 4];
    Gates gates[ROWS];
};

// ------------------------------------------------------------------------------------------------------------------ PTX

// What the kernel before wrote while this one was here already must not come from the L1 cache. (No clobber of memory, which
// would put one load after the other; volatile assembly stays in order.)
__device__ __forceinline__ float fresh(const float* at) {
    float x;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x) : "l"(at));
    return x;
}

// 16 bytes past the L1 cache to shared memory.
__device__ __forceinline__ void copy(float4* to, const float* from) {
    const uint32 at = (uint32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}

// A state is read once, and past the L1 cache, where nothing of it can be left from before the last commit.
template <int N>
__device__ __forceinline__ void committed(float* x, const float* at) {
    if constexpr (N == 4)
        asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                     : "l"(at));
    else
        asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "l"(at));
}

// The instructions that Triton makes of exp in replay, which has to find the same number.
__device__ __forceinline__ float decay_of(float g) {
    float scaled, x;
    asm("mul.rn.f32 %0, %1, 0f3FB8AA3B;" : "=f"(scaled) : "f"(g));
    asm("ex2.approx.f32 %0, %1;" : "=f"(x) : "f"(scaled));
    return x;
}

// --------------------------------------------------------------------------------------------------------------- the walk

// Of two numbers the one that this thread keeps, with what another thread has of it.
__device__ __forceinline__ float kept(float first, float second, bool keep_second, int lanes) {
    const float keep = keep_second ? second : first, send = keep_second ? first : second;
    return __fadd_rn(keep, __shfl_xor_sync(ALL, send, lanes));
}

// One step of a sum over threads: while there are several columns, each of two threads goes on with half of them.
template <int N>
__device__ __forceinline__ void halve(float* sums, int lane, int lanes) {
    if constexpr (N > 1) {
#pragma unroll
        for (int c = 0; c < N / 2; c++) sums[c] = kept(sums[c], sums[c + N / 2], lane & lanes, lanes);
    } else {
        sums[0] = __fadd_rn(sums[0], __shfl_xor_sync(ALL, sums[0], lanes));
    }
}

__device__ __forceinline__ float over_threads(float (&sums)[COLUMNS], int lane) {
    halve<COLUMNS>(sums, lane, 16);
    halve<COLUMNS / 2>(sums, lane, 8);
    halve<COLUMNS / 4>(sums, lane, 4);
    return sums[0];
}

// Which of its group's columns a thread has the sums of, and for each column the first of the threads that do.
__device__ __forceinline__ int own_column(int lane) {
    return COLUMNS == 8 ? (lane & 16) / 4 + (lane & 8) / 4 + (lane & 4) / 4 : COLUMNS == 4 ? lane / 8 : lane / 16;
}

__device__ __forceinline__ int owner_of(int column) { return COLUMNS == 8 ? 4 * column : COLUMNS == 4 ? 8 * column : 16 * column; }

// Where a column of a group lies among those of its warp.
__device__ __forceinline__ int place_of(int column, int group) {
    return column / VECTOR * (GROUPS * VECTOR) + group * VECTOR + column % VECTOR;
}

// What a thread is for.
struct Thread {
    int lane, part, group;  // part: which rows of every band; group: which columns of its warp's
    int own;                // the column in the CTA that it has the sums of

    __device__ __forceinline__ Thread(int warp, int lane) : lane(lane), part(lane / GROUPS), group(lane % GROUPS) {
        own = warp * WARP_COLUMNS + place_of(own_column(lane), group);
    }
};

// A thread's rows of a vector over Dk.
struct Part {
    float x[4 * BANDS];

    __device__ __forceinline__ Part(const float4 (&row)[DK / 4], int part) {
#pragma unroll
        for (int band = 0; band < BANDS; band++) {
            const float4 four = row[8 * band + part];
            x[4 * band] = four.x, x[4 * band + 1] = four.y, x[4 * band + 2] = four.z, x[4 * band + 3] = four.w;
        }
    }
    // The same once more: volatile, or the compiler would hold what it has.
    __device__ __forceinline__ void reload(const float4 (&row)[DK / 4], int part) {
#pragma unroll
        for (int band = 0; band < BANDS; band++)
            asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                         : "=f"(x[4 * band]), "=f"(x[4 * band + 1]), "=f"(x[4 * band + 2]), "=f"(x[4 * band + 3])
                         : "r"((uint32)__cvta_generic_to_shared(&row[8 * band + part])));
    }
};

// A thread's part of Sᵀx.
__device__ __forceinline__ void read(float (&sums)[COLUMNS], const float (&s)[4 * BANDS][COLUMNS], const Part& part) {
#pragma unroll
    for (int i = 0; i < 4 * BANDS; i++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            sums[c] = i ? __fmaf_rn(part.x[i], s[i][c], sums[c]) : __fmul_rn(part.x[0], s[0][c]);
}

// One row. ADVANCE: there is another one behind it, which needs the state.
template <bool ADVANCE>
__device__ __forceinline__ void step(float (&s)[4 * BANDS][COLUMNS], const Rows& rows, int row, const Thread& thread,
                                     float* out, float* delta) {
    float of_k[COLUMNS], of_q[COLUMNS];
    Part k(rows.k[row], thread.part);
    read(of_k, s, k);
    const Gates gates = rows.gates[row];
    const float v = reinterpret_cast<const float*>(rows.v[row])[thread.own];
    const float d = __fmul_rn(gates.strength, __fmaf_rn(-gates.decay, over_threads(of_k, thread.lane), v));
    read(of_q, s, Part(rows.q[row], thread.part));
    const float o = __fmaf_rn(gates.overlap, d, __fmul_rn(gates.decay, over_threads(of_q, thread.lane)));
    if (COLUMNS == 8)
        *delta = d, *out = o;
    else if (COLUMNS == 4 || !(thread.lane & 8))  // two threads have both, and each stores what is behind its ``out``
        *out = thread.lane & 4 ? o : d;
    if (ADVANCE) {
        if (RELOAD) k.reload(rows.k[row], thread.part);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const float of_column = __shfl_sync(ALL, d, thread.group + owner_of(c));
#pragma unroll
            for (int i = 0; i < 4 * BANDS; i++)
                s[i][c] = __fmaf_rn(k.x[i], of_column, __fmul_rn(gates.decay, s[i][c]));
        }
    }
}

// ``count`` rows to shared memory, each by one warp; q, k, v, beta and g are those of the first row.
__device__ __forceinline__ void bring(Rows& rows, int count, const float* q, const float* k, const float* v, const float* beta,
                                      const float* g, int64 q_stride, int64 k_stride, int heads, int warp, int lane) {
#pragma unroll
    for (int row = warp; row < warp + ROWS; row += WARPS) {
        if (row >= count) continue;
        copy(&rows.k[row][lane], k + row * k_stride + 4 * lane);
        copy(&rows.q[row][lane], q + row * q_stride + 4 * lane);
        if (lane < CTA_COLUMNS / 4) copy(&rows.v[row][lane], v + row * heads * DV + 4 * lane);
    }
    if (threadIdx.x < count) {
        const float strength = fresh(beta + threadIdx.x * heads), log_decay = fresh(g + threadIdx.x * heads);
        rows.gates[threadIdx.x].strength = strength;
        rows.gates[threadIdx.x].decay = decay_of(log_decay);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
    for (int row = warp; row < warp + ROWS; row += WARPS) {
        // What this thread has copied itself. Of rows that are not there it is anything, which nobody reads.
        const float4 of_k = rows.k[row][lane], of_q = rows.q[row][lane];
        float overlap = __fmul_rn(of_k.x, of_q.x);
        overlap = __fmaf_rn(of_k.y, of_q.y, overlap);
        overlap = __fmaf_rn(of_k.z, of_q.z, overlap);
        overlap = __fmaf_rn(of_k.w, of_q.w, overlap);
#pragma unroll
        for (int lanes = 16; lanes; lanes /= 2) overlap = __fadd_rn(overlap, __shfl_xor_sync(ALL, overlap, lanes));
        if (lane == 0) rows.gates[row].overlap = overlap;
    }
}

// Grid: parts of a head's columns, value heads, spans.
extern "C" __global__ void __launch_bounds__(32 * WARPS, CTAS)
    verify(const float* q, const float* k, const float* v, const float* beta, const float* g, const float* state, float* out,
           float* delta, const int64* head_map, const int64* lanes, const int64* starts, const int64* lengths, int64 q_stride,
           int64 k_stride) {
    __shared__ Rows rows;
    asm volatile("griddepcontrol.launch_dependents;");
    // Through a shuffle, so that the compiler sees that it is the same for the whole warp.
    const int warp = __shfl_sync(ALL, threadIdx.x / 32, 0);
    const Thread thread(warp, threadIdx.x % 32);
    const int head = blockIdx.y, heads = gridDim.y, span = blockIdx.z, first_column = blockIdx.x * CTA_COLUMNS;
    const int64 start = starts[span], length = lengths[span], lane = lanes[span], key = head_map[head] * DK;
    float s[4 * BANDS][COLUMNS];
    // Committed state changes between forwards only: it is on its way while the kernels before this one still run.
    // (No lane is negative, but asked for here it is fetched beside the length and not behind it.)
    if ((length != 0) & (lane >= 0)) {
        const float* tile = state + (lane * heads + head) * (DK * DV) + first_column + warp * WARP_COLUMNS;
        tile += 4 * thread.part * DV + thread.group * VECTOR;
#pragma unroll
        for (int i = 0; i < 4 * BANDS; i++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c += VECTOR)
                committed<VECTOR>(&s[i][c], tile + (i / 4 * 32 + i % 4) * DV + place_of(c, 0));
    }
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (!length) return;
    const int64 of_rows = start * heads + head, next = heads * DV;
    q += start * q_stride + key, k += start * k_stride + key;
    v += of_rows * DV + first_column, beta += of_rows, g += of_rows;
    out += of_rows * DV + first_column + thread.own, delta += of_rows * DV + first_column + thread.own;
    if (COLUMNS < 8 && !(thread.lane & 4)) out = delta;
#pragma unroll 1
    for (int left = length;; left -= ROWS) {
        const bool last = left <= ROWS;
        const int count = last ? left : ROWS;
        bring(rows, count, q, k, v, beta, g, q_stride, k_stride, heads, warp, thread.lane);
        __syncthreads();
#pragma unroll 1
        for (int row = 0; row < count - last; row++, out += next, delta += next) step<true>(s, rows, row, thread, out, delta);
        if (last) return step<false>(s, rows, count - 1, thread, out, delta);
        q += ROWS * q_stride, k += ROWS * k_stride;
        v += ROWS * next, beta += ROWS * heads, g += ROWS * heads;
        __syncthreads();  // nobody reads the rows any more
    }
}
