// Weight-streaming INT8 GEMV for one to eight tokens: the time is that of reading the weights once.
//
// A block owns OUT output channels at a time and its threads split K, 16 bytes each. The next weights are requested
// before the present ones are used. Sums are exact in int32 (per group: int32 within a thread's 16 inputs, which lie in
// one group, then float32), are reduced by shuffles and across waves, and get the epilogue x_scale * w_scale + bias.
// A float x of one token is quantized by every block for itself while its first weights are on their way: a launch less.
// With `expert`, blockIdx.y is a slot, and each slot's row of x goes through its own expert's weights.

#include "portable.h"

constexpr int MAX_QUANTIZED_K = 8192;  // inputs that a block quantizes for itself, in shared memory
constexpr float SCALE_FLOOR = 127.f * 1.17549435e-38f;  // quantkit.arithmetic
constexpr int MAX_THREADS = 256;  // of a block; with more, eight tokens would not fit into registers

struct Arguments {
  const int8_t* x;         // [tokens, k]
  const float* x_scale;    // [tokens, groups]
  const int8_t* w;         // [n, k], or [experts, n, k]
  const float* w_scale;    // [n], or [experts, n]
  const void* bias;        // [n], or [experts, n]; may be null
  void* out;               // [tokens, n], or [slots, n]
  const int64_t* expert;   // [slots], or null; slots of experts outside 0..experts-1 are left as they are
  int tokens, n, k, group, experts, share, out_type, bias_type, x_type;  // x_type: of a float x, or -1
};

namespace {  // nothing but the two functions at the end is seen from outside

template <int OUT>
__device__ __forceinline__ void fetch(qk_int8x16 (&w)[OUT], const int8_t* weights, int tile, int at, int n, int k) {
  for (int o = 0; o < OUT; ++o) {
    const int row = tile * OUT + o;
    w[o] = row < n && at < k ? qk_stream(weights + (int64_t)row * k + at) : qk_int8x16{};
  }
}

// Largest magnitude, or NaN if one is.
__device__ __forceinline__ float larger(float a, float b) { return b > a || b != b ? b : a; }

// Quantize the row `x` into `q`; returns its scale. All threads of the block take part.
__device__ float quantize_row(const void* x, int type, int64_t start, int k, int8_t* q, float* wave_tops) {
  const int thread = threadIdx.x, threads = blockDim.x;
  float value[16], top = 0.f;
  for (int at = thread * 16; at < k; at += threads * 16) {
    qk_read16(x, type, start + at, value);
    for (int i = 0; i < 16; ++i) top = larger(top, fabsf(value[i]));
  }
  for (int mask = QK_WAVE / 2; mask > 0; mask /= 2) top = larger(top, QK_SHUFFLE_XOR(top, mask));
  if (thread % QK_WAVE == 0) wave_tops[thread / QK_WAVE] = top;
  __syncthreads();
  for (int wave = 0; wave < threads / QK_WAVE; ++wave) top = larger(top, wave_tops[wave]);
  float scale = top / 127.f;
  if (scale < SCALE_FLOOR) scale = SCALE_FLOOR;
  for (int at = thread * 16; at < k; at += threads * 16) {
    qk_read16(x, type, start + at, value);
    for (int i = 0; i < 16; ++i) q[at + i] = (int8_t)rintf(value[i] / scale);
  }
  __syncthreads();
  return scale;
}

template <int OUT, int TOKENS, bool GROUPED, bool QUANTIZE>
__global__ void __launch_bounds__(MAX_THREADS) gemv(Arguments a) {
  typedef typename std::conditional<GROUPED, float, int>::type sum_t;
  const int thread = threadIdx.x, threads = blockDim.x, waves = threads / QK_WAVE;
  const int steps = (a.k + threads * 16 - 1) / (threads * 16), tiles = (a.n + OUT - 1) / OUT;
  const int groups = GROUPED ? a.k / a.group : 1;
  int64_t slot = 0, which = 0;
  if (!a.expert) QK_LET_NEXT_START();
  if (a.expert) {
    slot = blockIdx.y;
    which = a.expert[slot];
    if (which < 0 || which >= a.experts) {
      QK_AFTER_PREVIOUS();
      return;
    }
    if (!QUANTIZE) {
      a.x += slot / a.share * a.k;
      a.x_scale += slot / a.share * groups;
    }
  }
  const int8_t* weights = a.w + which * a.n * a.k;
  __shared__ sum_t partial[2][OUT * TOKENS][MAX_THREADS / QK_WAVE];  // two buffers, so that one barrier per tile is enough

  qk_int8x16 next[OUT];
  fetch<OUT>(next, weights, blockIdx.x, thread * 16, a.n, a.k);
  QK_AFTER_PREVIOUS();
  if (a.expert) QK_LET_NEXT_START();
  alignas(16) __shared__ int8_t own_x[QUANTIZE ? MAX_QUANTIZED_K : 16];
  __shared__ float wave_tops[MAX_THREADS / QK_WAVE];
  float own_scale = 0.f;
  if (QUANTIZE) own_scale = quantize_row(a.x, a.x_type, slot / a.share * a.k, a.k, own_x, wave_tops);
  int buffer = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, buffer ^= 1) {
    sum_t sum[OUT * TOKENS] = {};
    for (int step = 0; step < steps; ++step) {
      const int at = (step * threads + thread) * 16;
      qk_int8x16 w[OUT], x[TOKENS];
      for (int o = 0; o < OUT; ++o) w[o] = next[o];
      for (int t = 0; t < TOKENS; ++t)
        x[t] = at >= a.k   ? qk_int8x16{}
               : QUANTIZE ? *(const qk_int8x16*)(own_x + at)
                          : *(const qk_int8x16*)(a.x + (int64_t)(t < a.tokens ? t : 0) * a.k + at);
      const bool last = step + 1 == steps;
      fetch<OUT>(next, weights, last ? tile + (int)gridDim.x : tile, last ? thread * 16 : at + threads * 16, a.n, a.k);
      for (int t = 0; t < TOKENS; ++t) {
        const float scale = GROUPED && at < a.k ? a.x_scale[(t < a.tokens ? t : 0) * groups + at / a.group] : 0.f;
        for (int o = 0; o < OUT; ++o) {
          int dot = 0;
          for (int i = 0; i < 4; ++i) dot = qk_dot4(w[o].word[i], x[t].word[i], dot);
          sum[o * TOKENS + t] += GROUPED ? (sum_t)((float)dot * scale) : (sum_t)dot;
        }
      }
    }
    for (int i = 0; i < OUT * TOKENS; ++i)
      for (int mask = QK_WAVE / 2; mask > 0; mask /= 2) sum[i] += QK_SHUFFLE_XOR(sum[i], mask);
    if (thread % QK_WAVE == 0)
      for (int i = 0; i < OUT * TOKENS; ++i) partial[buffer][i][thread / QK_WAVE] = sum[i];
    __syncthreads();
    for (int i = thread; i < OUT * TOKENS; i += threads) {
      const int row = tile * OUT + i / TOKENS, token = i % TOKENS;
      if (row >= a.n || token >= a.tokens) continue;
      sum_t total = 0;
      for (int wave = 0; wave < waves; ++wave) total += partial[buffer][i][wave];
      float value = GROUPED ? (float)total : (float)total * (QUANTIZE ? own_scale : a.x_scale[token]);
      value *= a.w_scale[which * a.n + row];
      if (a.bias) value += qk_read(a.bias, a.bias_type, which * a.n + row);
      qk_write(a.out, a.out_type, (slot + token) * a.n + row, value);
    }
  }
}

template <int OUT, int TOKENS>
void launch(const Arguments& a, int blocks, int slots, int threads, void* stream) {
  const int tiles = (a.n + OUT - 1) / OUT;
  const int rounds = (tiles + blocks - 1) / blocks;  // all blocks get as many tiles, but for a rest
  const dim3 grid((tiles + rounds - 1) / rounds, slots), block(threads);
  if (a.group)
    QK_LAUNCH((gemv<OUT, TOKENS, true, false>), grid, block, stream, a);
  else if (TOKENS == 1 && a.x_type >= 0)
    QK_LAUNCH((gemv<OUT, TOKENS, false, TOKENS == 1>), grid, block, stream, a);
  else
    QK_LAUNCH((gemv<OUT, TOKENS, false, false>), grid, block, stream, a);
}

template <int OUT>
int by_tokens(const Arguments& a, int blocks, int slots, int threads, void* stream) {
  if (a.expert || a.tokens == 1) launch<OUT, 1>(a, blocks, slots, threads, stream);
  else if (a.tokens == 2) launch<OUT, 2>(a, blocks, slots, threads, stream);
  else if (a.tokens <= 4) launch<OUT, 4>(a, blocks, slots, threads, stream);
  else launch<OUT, 8>(a, blocks, slots, threads, stream);
  return QK_LAST_ERROR();
}

}  // namespace

// Returns 0, the launch's error code, or -1 for sizes that it has no kernel for. blocks: most blocks along x.
extern "C" int quantkit_gemv(const Arguments* a, int slots, int outputs, int threads, int blocks, void* stream) {
  const bool fits = a->tokens >= 1 && a->tokens <= 8 && a->k % 16 == 0 && a->group % 16 == 0 && threads % QK_WAVE == 0 &&
                    threads <= MAX_THREADS && (!a->group || a->k % a->group == 0) &&
                    (a->x_type < 0 || (a->tokens == 1 && !a->group && a->k <= MAX_QUANTIZED_K));
  if (!fits) return -1;
  if (outputs == 2) return by_tokens<2>(*a, blocks, slots, threads, stream);
  if (outputs == 8 && (a->expert || a->tokens <= 2)) {
    if (a->expert || a->tokens == 1) launch<8, 1>(*a, blocks, slots, threads, stream);
    else launch<8, 2>(*a, blocks, slots, threads, stream);
    return QK_LAST_ERROR();
  }
  if (outputs >= 4) return by_tokens<4>(*a, blocks, slots, threads, stream);
  return -1;
}

extern "C" int quantkit_wave() { return QK_WAVE; }
