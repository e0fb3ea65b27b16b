// What lies between the two products of a gated-delta-rule layer, for rows of generated tokens on Hopper GPUs (sm_90a) and heads of
// 128 by 128: the convolution, norms and gates, the walk, the output norm; the mathematics is in ref.py.
//
// hopper.py puts before this file COLUMNS, how many columns of a state a thread has, WARPS of a CTA and CTAS, how many of these a
// multiprocessor shall have room for; RELOAD: a thread reads its rows of k once more rather than hold them. No header is included.
//
// A CTA has a value head of one span. Up to eight rows at a time it makes what the walk reads of them, each thread one channel of q,
// k and v; then it walks the rows with the head's state in registers, and then norms them. Value heads that share a key head each
// make its q and k for themselves.
//
// In the walk eight threads of a warp share COLUMNS columns: each has 16 of their rows, which in every band of 32 are the four that
// one load of 16 bytes of k or q brings. Both reads of a row are of the state before it, S:
//
//     d = beta (v - e^g Sᵀk);   o = e^g Sᵀq + (k·q) d;   then S <- e^g S, rounded, and S <- S + k dᵀ, fused, as in replay
//
// so they are one walk, what decays does not wait for d, and the last row needs no new state. A sum over Dk is that of each
// thread's rows in order, then over the threads by 16, 8 and 4 lanes; one over channels is by 16, 8, 4, 2 and 1 lanes, then over the
// four warps: the same whatever COLUMNS and WARPS are.

typedef unsigned int uint32;
typedef long long int64;

constexpr int DK = 128, DV = 128, TAPS = 4;
constexpr int BANDS = DK / 32;
constexpr int GROUPS = 4;                          // of columns in a warp, each with threads side by side that have the same rows
constexpr int WARP_COLUMNS = GROUPS * COLUMNS;
constexpr int VECTOR = COLUMNS < 4 ? COLUMNS : 4;  // columns side by side, read at once
constexpr int ROWS = 8;                            // in shared memory at a time
constexpr int SHARERS = 32 * WARPS / DK;           // threads that have the same channels, and each some of the rows
constexpr int SHARE = ROWS / SHARERS;
constexpr int BLOCK = SHARE < 4 ? SHARE : 4;       // rows side by side in a thread, whether they are all there or not
static_assert(WARPS * WARP_COLUMNS == DV && SHARE * SHARERS == ROWS);
constexpr uint32 ALL = 0xffffffffu;
constexpr float QUERY_SCALE = 0.08838834764831845f;  // 128^-0.5

enum Part { Q, K, V, PARTS };             // of a head's channels, DK each
enum { B, A, SQUARE, GIVEN };             // of a row: b, a, and the squared norm of what all of it was made from
enum { DECAY, DT_BIAS, CONSTANTS };       // of a head

struct alignas(16) Facts {
    float decay, strength, overlap, scale;  // e^g, beta, k·q; what brings the row into the range of float16
};

struct Shared {
    float4 k[ROWS][DK / 4], q[ROWS][DK / 4];
    float4 v[ROWS][DV / 4], o[ROWS][DV / 4], z[ROWS][DV / 4];
    float4 raw[TAPS - 1 + ROWS][PARTS][DK / 4];  // the last rows before these, and these
    float4 taps[PARTS][DK], norm[DV / 4];
    float4 squares[2][ROWS], overlaps[ROWS];  // sums of each of four warps: of q², of k², of kq
    float4 given[ROWS][GIVEN], constants[CONSTANTS];  // each is one of four numbers side by side
    Facts facts[ROWS];
};

// ------------------------------------------------------------------------------------------------------------------ PTX

// Let the next kernel begin.
__device__ __forceinline__ void announce() { asm volatile("griddepcontrol.launch_dependents;"); }

// Wait until the kernel before has ended.
__device__ __forceinline__ void await_turn() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// 16 bytes to shared memory past the L1 cache, where there may be what lay there before the last kernels wrote it.
__device__ __forceinline__ void copy(float4* to, const float* from) {
    const uint32 at = (uint32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}

__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

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

// The same once more: volatile, or the compiler would hold what it has.
__device__ __forceinline__ void read_again(float* x, const float4* at) {
    asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "r"((uint32)__cvta_generic_to_shared(at)));
}

// The instructions that Triton makes of exp, also in replay, which has to find the same number.
__device__ __forceinline__ float exponential(float x) {
    asm("{mul.rn.f32 %0, %1, 0f3FB8AA3B;\n ex2.approx.f32 %0, %0;}" : "=&f"(x) : "f"(x));
    return x;
}

// Off by three in the last place. One plus a denormal number is one; a reciprocal that would be denormal becomes zero.
__device__ __forceinline__ float sigmoid(float x) {
    asm("{mul.rn.f32 %0, %1, 0fBFB8AA3B;\n ex2.approx.ftz.f32 %0, %0;\n add.rn.f32 %0, %0, 0f3F800000;\n rcp.approx.ftz.f32 %0, %0;}"
        : "=&f"(x)
        : "f"(x));
    return x;
}

__device__ __forceinline__ float quotient(float x, float y) {
    asm("div.full.f32 %0, %0, %1;" : "+f"(x) : "f"(y));
    return x;
}

__device__ __forceinline__ float inverse_root(float x) {
    asm("rsqrt.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}

__device__ __forceinline__ float root(float x) {
    asm("sqrt.approx.ftz.f32 %0, %0;" : "+f"(x));
    return x;
}

// Two numbers as float16, the first one in the low half.
__device__ __forceinline__ uint32 halves(float low, float high) {
    uint32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// ------------------------------------------------------------------------------------------------------------------ sums

// Of two numbers the one that this thread keeps, with what another thread has of it.
__device__ __forceinline__ float kept(float first, float second, bool keep_second, int lanes) {
    const float keep = keep_second ? second : first, send = keep_second ? first : second;
    return __fadd_rn(keep, __shfl_xor_sync(ALL, send, lanes));
}

// One step of N sums over threads: while there are several, each of two threads goes on with half of them.
template <int N>
__device__ __forceinline__ void halve(float* sums, int lane, int lanes) {
    if constexpr (N > 1) {
#pragma unroll
        for (int c = 0; c < N / 2; c++) sums[c] = kept(sums[c], sums[c + N / 2], lane & lanes, lanes);
    } else {
        sums[0] = __fadd_rn(sums[0], __shfl_xor_sync(ALL, sums[0], lanes));
    }
}

// Of N sums over a warp the one with number lane * N / 32.
template <int N>
__device__ __forceinline__ float over_warp(float (&sums)[N], int lane) {
    halve<N>(sums, lane, 16);
    halve<N / 2>(sums, lane, 8);
    halve<N / 4>(sums, lane, 4);
    halve<N / 8>(sums, lane, 2);
    halve<N / 16>(sums, lane, 1);
    return sums[0];
}

__device__ __forceinline__ float total(const float4& x) { return __fadd_rn(__fadd_rn(__fadd_rn(x.x, x.y), x.z), x.w); }

// ------------------------------------------------------------------------------------------------------- before the walk

// log1p(e^x), the logarithm from that of a rounded sum, whose rounding cancels in the quotient (Kahan).
__device__ __forceinline__ float softplus(float x) {
    const float grown = exponential(x > 20.0f ? 20.0f : x), u = __fadd_rn(1.0f, grown);
    const float small = u == 1.0f ? grown : __fmul_rn(logf(u), quotient(grown, __fadd_rn(u, -1.0f)));
    return x > 20.0f ? x : small;
}

// One over a length of q or k.
__device__ __forceinline__ float inverse_length(const float4& squares) {
    return inverse_root(__fadd_rn(total(squares), 1e-6f));
}

// Some of the rows of one channel, convolved and through silu: anything if they are none of the first ``count``. With a ``log`` the
// raw inputs are left there.
__device__ __forceinline__ void convolve(float (&x)[SHARE], const Shared& shared, Part part, int channel, int first, int count,
                                         float* log, int64 channels) {
    const float4 taps = shared.taps[part][channel];
    const float* raw = reinterpret_cast<const float*>(shared.raw[first][part]) + channel;
    constexpr int NEXT = PARTS * DK;
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        x[i] = 0.0f;
        if (first + i / BLOCK * BLOCK >= count) continue;
        const float a = raw[i * NEXT], b = raw[(i + 1) * NEXT], c = raw[(i + 2) * NEXT], d = raw[(i + 3) * NEXT];
        const float mixed = __fmaf_rn(d, taps.w, __fmaf_rn(c, taps.z, __fmaf_rn(b, taps.y, __fmaf_rn(a, taps.x, 0.0f))));
        x[i] = __fmul_rn(mixed, sigmoid(mixed));
        if (log && first + i < count) log[(first + i) * channels] = d;
    }
}

// Where the log has a chunk's rows: a channel of q, k and v of the raw inputs, the first two of them null for heads that leave these
// to another one, as ``k``.
struct Log {
    float *raw[PARTS], *k;
    int64 channels, keys;
};

// q, k, v and k·q of the chunk's rows, once their raw inputs are there.
__device__ __forceinline__ void prepare(Shared& shared, int count, const Log& log, int warp, int lane) {
    const int channel = threadIdx.x % DK, first = threadIdx.x / DK * SHARE;
    float q[SHARE], k[SHARE], x[SHARE];
    convolve(x, shared, V, channel, first, count, log.raw[V], log.channels);
#pragma unroll
    for (int i = 0; i < SHARE; i++) reinterpret_cast<float*>(shared.v[first + i])[channel] = x[i];
    convolve(q, shared, Q, channel, first, count, log.raw[Q], log.channels);
    convolve(k, shared, K, channel, first, count, log.raw[K], log.channels);
    const int row = first + lane * SHARE / 32, quarter = warp % 4;
#pragma unroll
    for (int i = 0; i < SHARE; i++) x[i] = __fmul_rn(q[i], q[i]);
    const float of_q = over_warp(x, lane);
#pragma unroll
    for (int i = 0; i < SHARE; i++) x[i] = __fmul_rn(k[i], k[i]);
    const float of_k = over_warp(x, lane);
#pragma unroll
    for (int i = 0; i < SHARE; i++) x[i] = __fmul_rn(k[i], q[i]);
    const float of_both = over_warp(x, lane);
    if (lane % (32 / SHARE) == 0) {
        reinterpret_cast<float*>(&shared.squares[Q][row])[quarter] = of_q;
        reinterpret_cast<float*>(&shared.squares[K][row])[quarter] = of_k;
        reinterpret_cast<float*>(&shared.overlaps[row])[quarter] = of_both;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < SHARE; i++) {
        if (first + i / BLOCK * BLOCK >= count) continue;
        const float of_q = __fmul_rn(inverse_length(shared.squares[Q][first + i]), QUERY_SCALE);
        const float of_k = inverse_length(shared.squares[K][first + i]), normed = __fmul_rn(k[i], of_k);
        reinterpret_cast<float*>(shared.q[first + i])[channel] = __fmul_rn(q[i], of_q);
        reinterpret_cast<float*>(shared.k[first + i])[channel] = normed;
        if (log.k && first + i < count) log.k[(first + i) * log.keys] = normed;
        if (channel == i)
            shared.facts[first + i].overlap = __fmul_rn(__fmul_rn(total(shared.overlaps[first + i]), of_k), of_q);
    }
}

// --------------------------------------------------------------------------------------------------------------- the walk

// Which of its group's columns a thread has the sums of, and for each column the first of the threads that do.
__device__ __forceinline__ int own_column(int lane) { return lane * COLUMNS / 32; }

__device__ __forceinline__ int owner_of(int column) { return 32 / COLUMNS * column; }

// Where a column of a group lies among those of its warp.
__device__ __forceinline__ int place_of(int column, int group) {
    return column / VECTOR * (GROUPS * VECTOR) + group * VECTOR + column % VECTOR;
}

// What a thread is for.
struct Thread {
    int lane, part, group;  // part: which rows of every band; group: which columns of its warp's
    int own;                // the column that it has the sums of

    __device__ __forceinline__ Thread(int warp, int lane) : lane(lane), part(lane / GROUPS), group(lane % GROUPS) {
        own = warp * WARP_COLUMNS + place_of(own_column(lane), group);
    }
};

__device__ __forceinline__ float over_threads(float (&sums)[COLUMNS], int lane) {
    halve<COLUMNS>(sums, lane, 16);
    halve<COLUMNS / 2>(sums, lane, 8);
    halve<COLUMNS / 4>(sums, lane, 4);
    return sums[0];
}

// A thread's rows of a vector over Dk.
struct Slice {
    float x[4 * BANDS];

    __device__ __forceinline__ Slice(const float4 (&row)[DK / 4], int part) {
#pragma unroll
        for (int band = 0; band < BANDS; band++) {
            const float4 four = row[8 * band + part];
            x[4 * band] = four.x, x[4 * band + 1] = four.y, x[4 * band + 2] = four.z, x[4 * band + 3] = four.w;
        }
    }
    __device__ __forceinline__ void reload(const float4 (&row)[DK / 4], int part) {
#pragma unroll
        for (int band = 0; band < BANDS; band++) read_again(x + 4 * band, &row[8 * band + part]);
    }
};

// A thread's part of Sᵀx.
__device__ __forceinline__ void read(float (&sums)[COLUMNS], const float (&s)[4 * BANDS][COLUMNS], const Slice& slice) {
#pragma unroll
    for (int i = 0; i < 4 * BANDS; i++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
            sums[c] = i ? __fmaf_rn(slice.x[i], s[i][c], sums[c]) : __fmul_rn(slice.x[0], s[0][c]);
}

// One row. ADVANCE: there is another one behind it, which needs the state. d goes to the log, o to shared memory.
template <bool ADVANCE>
__device__ __forceinline__ void step(float (&s)[4 * BANDS][COLUMNS], Shared& shared, int row, const Thread& thread, float* delta) {
    float of_k[COLUMNS], of_q[COLUMNS];
    Slice k(shared.k[row], thread.part);
    read(of_k, s, k);
    const Facts facts = shared.facts[row];
    const float v = reinterpret_cast<const float*>(shared.v[row])[thread.own];
    const float d = __fmul_rn(facts.strength, __fmaf_rn(-facts.decay, over_threads(of_k, thread.lane), v));
    read(of_q, s, Slice(shared.q[row], thread.part));
    const float o = __fmaf_rn(facts.overlap, d, __fmul_rn(facts.decay, over_threads(of_q, thread.lane)));
    if (COLUMNS == 8 || thread.lane % (32 / COLUMNS) < 4) {  // one of the threads that have them
        *delta = d;
        reinterpret_cast<float*>(shared.o[row])[thread.own] = o;
    }
    if (ADVANCE) {
        if (RELOAD) k.reload(shared.k[row], thread.part);
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            const float of_column = __shfl_sync(ALL, d, thread.group + owner_of(c));
#pragma unroll
            for (int i = 0; i < 4 * BANDS; i++)
                s[i][c] = __fmaf_rn(k.x[i], of_column, __fmul_rn(facts.decay, s[i][c]));
        }
    }
}

// --------------------------------------------------------------------------------------------------------- after the walk

// One row of the head, four columns of it: rms_norm(o) * silu(z), as float16, if the row is there.
__device__ __forceinline__ void finish(const Shared& shared, int row, bool there, float eps, uint2* to, int lane) {
    const float4 o = shared.o[row][lane], z = shared.z[row][lane], norm = shared.norm[lane];
    float squares[1] = {__fmaf_rn(o.w, o.w, __fmaf_rn(o.z, o.z, __fmaf_rn(o.y, o.y, __fmul_rn(o.x, o.x))))};
    const float length = inverse_root(__fmaf_rn(over_warp(squares, lane), 1.0f / DV, eps)), scale = shared.facts[row].scale;
    const auto gated = [=](float o, float norm, float z) {
        const float normed = __fmul_rn(__fmul_rn(o, length), norm);
        return __fmul_rn(__fmul_rn(normed, __fmul_rn(z, sigmoid(z))), scale);
    };
    const uint32 low = halves(gated(o.x, norm.x, z.x), gated(o.y, norm.y, z.y));
    const uint32 high = halves(gated(o.z, norm.z, z.z), gated(o.w, norm.w, z.w));
    if (there) to[lane] = make_uint2(low, high);
}

// The exponent of two by which a row is multiplied: it brings what is at most ``bound`` to 2^14 to 2^15.
__device__ __forceinline__ int shift_of(float bound) {
    const int exponent = (int)(__float_as_uint(bound) >> 23) - 127;
    return 14 - (exponent < -112 ? -112 : exponent);
}

// ----------------------------------------------------------------------------------------------------------------- kernel

struct Arguments {
    const float *raw, *z, *b, *a, *norms, *history, *taps, *decay, *dt_bias, *norm, *state;
    uint2* values;
    float *factors, *log_raw, *log_k, *log_d, *log_g;
    const int64 *head_map, *lanes, *starts, *lengths;
    int64 raw_stride, z_stride, b_stride, a_stride;
    int key_heads;
    float eps, bound;  // of an output over the norm of its row
};

// The one of four numbers side by side that is at ``index`` of a tensor.
__device__ __forceinline__ float one_of(const float4& four, int64 index) { return reinterpret_cast<const float*>(&four)[index % 4]; }

__device__ __forceinline__ void copy_four(float4* to, const float* tensor, int64 index) { copy(to, tensor + index / 4 * 4); }

// Grid: value heads, spans.
extern "C" __global__ void __launch_bounds__(32 * WARPS, CTAS) mixer(const __grid_constant__ Arguments of) {
    __shared__ Shared shared;
    announce();
    // Through a shuffle, so that the compiler sees that it is the same for the whole warp.
    const int warp = __shfl_sync(ALL, threadIdx.x / 32, 0);
    const Thread thread(warp, threadIdx.x % 32);
    const int head = blockIdx.x, heads = gridDim.x, span = blockIdx.y, keys = of.key_heads * DK;
    const int64 start = of.starts[span], length = of.lengths[span], lane = of.lanes[span];
    const int key = of.head_map[head];
    const int64 channels = 2 * keys + heads * DV;
    const auto channel_of = [=](int part) { return part == V ? 2 * keys + head * DV : part * keys + key * DK; };
    // A row of raw inputs, of which ``line`` is what this thread's first channel would be.
    const auto bring = [&](int place, const float* line) {
#pragma unroll
        for (int part = 0; part < PARTS; part++) copy(&shared.raw[place][part][thread.lane], line + channel_of(part));
    };
    float s[4 * BANDS][COLUMNS];
    // Committed state changes between forwards only: it is on its way while the kernels before this one still run.
    // (No lane is negative, but asked for here it is fetched beside the length and not behind it.)
    if ((length != 0) & (lane >= 0)) {
        const float* tile = of.state + (lane * heads + head) * (DK * DV) + warp * WARP_COLUMNS;
        tile += 4 * thread.part * DV + thread.group * VECTOR;
#pragma unroll
        for (int i = 0; i < 4 * BANDS; i++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c += VECTOR)
                committed<VECTOR>(&s[i][c], tile + (i / 4 * 32 + i % 4) * DV + place_of(c, 0));
        if (warp < TAPS - 1) bring(warp, of.history + (lane * (TAPS - 1) + warp) * channels + 4 * thread.lane);
#pragma unroll
        for (int i = threadIdx.x; i < PARTS * DK; i += 32 * WARPS)
            copy(&shared.taps[i / DK][i % DK], of.taps + (channel_of(i / DK) + i % DK) * TAPS);
        if (warp == WARPS - 1) {
            copy(&shared.norm[thread.lane], of.norm + 4 * thread.lane);
            if (thread.lane < CONSTANTS)
                copy_four(&shared.constants[thread.lane], thread.lane == DECAY ? of.decay : of.dt_bias, head);
        }
    }
    const float* raw = of.raw + (start + warp) * of.raw_stride + 4 * thread.lane;  // of a chunk, this warp's first row
    const float* z = of.z + (start + warp) * of.z_stride + head * DV + 4 * thread.lane;
    await_turn();
    if (!length) return;
#pragma unroll 1
    for (int done = 0;; done += ROWS) {
        const bool last = length - done <= ROWS;
        const int count = last ? length - done : ROWS;
        const int64 row = start + done, own = row + thread.lane;
        const bool has_facts = warp == WARPS - 1 && thread.lane < count;  // of its own row
        // All that is read of the rows comes at once; the raw inputs before the first ones are the history.
#pragma unroll
        for (int i = 0; i < (ROWS + WARPS - 1) / WARPS; i++) {
            if (warp + i * WARPS >= count) continue;
            bring(TAPS - 1 + warp + i * WARPS, raw + i * WARPS * of.raw_stride);
            copy(&shared.z[warp + i * WARPS][thread.lane], z + i * WARPS * of.z_stride);
        }
        if (has_facts) {
            copy_four(&shared.given[thread.lane][B], of.b + own * of.b_stride, head);
            copy_four(&shared.given[thread.lane][A], of.a + own * of.a_stride, head);
            copy_four(&shared.given[thread.lane][SQUARE], of.norms, own);
        }
        if (done && warp < TAPS - 1) bring(warp, raw - (TAPS - 1) * of.raw_stride);
        raw += ROWS * of.raw_stride, z += ROWS * of.z_stride;
        bool first = true;  // of the heads that read this key head
#pragma unroll 1
        for (int i = thread.lane; i < head; i += 64) {
            const int64 one = of.head_map[i], other = i + 32 < head ? of.head_map[i + 32] : -1;
            first &= (one != key) & (other != key);
        }
        first = __all_sync(ALL, first);
        await_copies();
        if (has_facts) {
            const float4* given = shared.given[thread.lane];
            const int shift = shift_of(__fmul_rn(root(one_of(given[SQUARE], own)), of.bound));
            Facts& facts = shared.facts[thread.lane];
            facts.scale = __uint_as_float((127 + shift) << 23);
            if (head == 0) of.factors[own] = __uint_as_float((127 - shift) << 23);
        }
        __syncthreads();
        if (has_facts) {
            const float4* given = shared.given[thread.lane];
            Facts& facts = shared.facts[thread.lane];
            const float x = __fadd_rn(one_of(given[A], head), one_of(shared.constants[DT_BIAS], head));
            const float g = __fmul_rn(one_of(shared.constants[DECAY], head), softplus(x));
            facts.strength = sigmoid(one_of(given[B], head));
            facts.decay = exponential(g);
            of.log_g[own * heads + head] = g;
        }
        const int channel = threadIdx.x % DK;
        float* line = of.log_raw + row * channels + channel;
        float* k = of.log_k + row * keys + key * DK + channel;
        const Log log = {{first ? line + channel_of(Q) : nullptr, first ? line + channel_of(K) : nullptr, line + channel_of(V)},
                         first ? k : nullptr,
                         channels,
                         keys};
        prepare(shared, count, log, warp, thread.lane);
        __syncthreads();
        float* delta = of.log_d + (row * heads + head) * DV + thread.own;
#pragma unroll 1
        for (int i = 0; i < count - last; i++, delta += heads * DV) step<true>(s, shared, i, thread, delta);
        if (last) step<false>(s, shared, count - 1, thread, delta);
        __syncthreads();
#pragma unroll
        for (int i = 0; i < (ROWS + WARPS - 1) / WARPS; i++) {
            const int own = warp + i * WARPS;
            if (WARPS > ROWS && own >= ROWS) continue;
            finish(shared, own, own < count, of.eps, of.values + ((row + own) * heads + head) * (DV / 4), thread.lane);
        }
        if (last) return;
        __syncthreads();  // nobody reads these rows any more
    }
}
