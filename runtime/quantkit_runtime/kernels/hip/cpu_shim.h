// Runs a kernel on the CPU: every thread of a block is a fiber, and fibers take turns at each barrier and shuffle.
// It shows that the arithmetic and the indexing are right, at either wave size; it is no way to compute.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace qk_cpu {
static dim3 grid, block, block_index, thread_index;
static ucontext_t scheduler;
static std::vector<ucontext_t> fibers;
static std::vector<uint64_t> exchange;
static std::function<void()> body;
static unsigned current;

static void barrier() { swapcontext(&fibers[current], &scheduler); }

template <typename T>
static T shuffle_xor(T value, int mask) {
  static_assert(sizeof(T) <= 8, "a shuffle moves 8 bytes");
  __builtin_memcpy(&exchange[thread_index.x], &value, sizeof(T));
  barrier();
  T other;
  __builtin_memcpy(&other, &exchange[thread_index.x ^ mask], sizeof(T));
  barrier();
  return other;
}

static void run_block() {
  const size_t stack = 64 * 1024;
  std::vector<char> stacks(stack * block.x);
  std::vector<bool> done(block.x, false);
  fibers.assign(block.x, ucontext_t{});
  exchange.assign(block.x, 0);
  static std::vector<bool>* finished;
  finished = &done;
  for (unsigned t = 0; t < block.x; ++t) {
    getcontext(&fibers[t]);
    fibers[t].uc_stack.ss_sp = &stacks[t * stack];
    fibers[t].uc_stack.ss_size = stack;
    fibers[t].uc_link = &scheduler;
    makecontext(&fibers[t], +[] { body(); (*finished)[current] = true; }, 0);
  }
  while (!std::all_of(done.begin(), done.end(), [](bool one) { return one; }))
    for (current = 0; current < block.x; ++current)
      if (!done[current]) {
        thread_index = dim3(current);
        swapcontext(&scheduler, &fibers[current]);
      }
}

static void run(dim3 grid_, dim3 block_, std::function<void()> body_) {
  grid = grid_, block = block_, body = std::move(body_);
  for (unsigned y = 0; y < grid.y; ++y)
    for (unsigned x = 0; x < grid.x; ++x) {
      block_index = dim3(x, y);
      run_block();
    }
}
}  // namespace qk_cpu

#define gridDim qk_cpu::grid
#define blockDim qk_cpu::block
#define blockIdx qk_cpu::block_index
#define threadIdx qk_cpu::thread_index
#define __syncthreads() qk_cpu::barrier()
#define QK_SHUFFLE_XOR(value, mask) qk_cpu::shuffle_xor(value, mask)
#define QK_LAUNCH(kernel, grid, block, stream, ...) qk_cpu::run(grid, block, [=] { kernel(__VA_ARGS__); })
#define QK_LAST_ERROR() 0
