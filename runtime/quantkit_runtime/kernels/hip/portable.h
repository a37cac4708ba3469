// What differs between hipcc, nvcc and a CPU compiler: the only place that knows.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(QK_CPU)  // -DQK_CPU -DQK_WAVE=64
#include "cpu_shim.h"
typedef _Float16 qk_half;
#elif defined(__CUDACC__)  // nvcc -x cu
#include <cuda_fp16.h>
#define QK_WAVE 32
#define QK_SHUFFLE_XOR(value, mask) __shfl_xor_sync(0xffffffffu, value, mask)
#define QK_LAUNCH(kernel, grid, block, stream, arguments) qk_launch(kernel, grid, block, stream, arguments)
#define QK_LAST_ERROR() ((int)cudaGetLastError())
typedef __half qk_half;

// From sm_90 on a kernel may start while its predecessor ends: weights are requested before QK_AFTER_PREVIOUS. The small
// kernels let their successor start after their own wait: what came before them is complete when it starts, which the
// index of a GEMV by expert relies on.
template <typename Kernel, typename Arguments>
static void qk_launch(Kernel kernel, dim3 grid, dim3 block, void* stream, const Arguments& arguments) {
#if __CUDA_ARCH_LIST__ >= 900
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = block, config.stream = (cudaStream_t)stream;
  config.attrs = &overlap, config.numAttrs = 1;
  cudaLaunchKernelEx(&config, kernel, arguments);
#else
  kernel<<<grid, block, 0, (cudaStream_t)stream>>>(arguments);
#endif
}
#else  // hipcc
#include <hip/hip_runtime.h>
#define QK_WAVE __AMDGCN_WAVEFRONT_SIZE
#define QK_SHUFFLE_XOR(value, mask) __shfl_xor(value, mask)
#define QK_LAUNCH(kernel, grid, block, stream, ...) kernel<<<grid, block, 0, (hipStream_t)(stream)>>>(__VA_ARGS__)
#define QK_LAST_ERROR() ((int)hipGetLastError())
typedef _Float16 qk_half;
#endif

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define QK_AFTER_PREVIOUS() asm volatile("griddepcontrol.wait;" ::: "memory")
#define QK_LET_NEXT_START() asm volatile("griddepcontrol.launch_dependents;")
#else
#define QK_AFTER_PREVIOUS()
#define QK_LET_NEXT_START()
#endif

struct alignas(16) qk_int8x16 {
  int word[4];
};

// c + the dot product of four int8 pairs.
__device__ __forceinline__ int qk_dot4(int a, int b, int c) {
#if defined(__CUDA_ARCH__)
  return __dp4a(a, b, c);
#elif defined(__HIP_DEVICE_COMPILE__) && !defined(QK_NO_DOT4)
  return __builtin_amdgcn_sdot4(a, b, c, false);
#else
  for (int i = 0; i < 32; i += 8) c += (int)(int8_t)(a >> i) * (int)(int8_t)(b >> i);
  return c;
#endif
}

// Weights are read once: they shall not push activations out of the caches.
__device__ __forceinline__ qk_int8x16 qk_stream(const int8_t* at) {
  qk_int8x16 value;
#if defined(__CUDA_ARCH__)
  asm("ld.global.nc.L1::no_allocate.v4.s32 {%0,%1,%2,%3}, [%4];"
      : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3]) : "l"(at));
#elif defined(__HIP_DEVICE_COMPILE__)
  typedef int vector4 __attribute__((ext_vector_type(4)));
  const vector4 loaded = __builtin_nontemporal_load((const vector4*)at);
  for (int i = 0; i < 4; ++i) value.word[i] = loaded[i];
#else
  value = *(const qk_int8x16*)at;
#endif
  return value;
}

enum qk_type { QK_FLOAT32 = 0, QK_BFLOAT16 = 1, QK_FLOAT16 = 2 };

__device__ __forceinline__ float qk_from16(uint16_t bits, int type) {
  float value;
  if (type == QK_FLOAT16) {
    qk_half half;
    memcpy(&half, &bits, 2);
    value = (float)half;
  } else {
    const uint32_t wide = (uint32_t)bits << 16;
    memcpy(&value, &wide, 4);
  }
  return value;
}

__device__ __forceinline__ float qk_read(const void* values, int type, int64_t at) {
  if (type == QK_FLOAT32) return ((const float*)values)[at];
  return qk_from16(((const uint16_t*)values)[at], type);
}

// 16 values from a place that is a multiple of 16, by 16-byte loads.
__device__ __forceinline__ void qk_read16(const void* values, int type, int64_t at, float (&out)[16]) {
  const int each = type == QK_FLOAT32 ? 4 : 8;
  const qk_int8x16* from = (const qk_int8x16*)((const char*)values + at * (16 / each));
  for (int i = 0; i < 16 / each; ++i) {
    const qk_int8x16 loaded = from[i];
    for (int j = 0; j < 4; ++j) {
      const uint32_t word = (uint32_t)loaded.word[j];
      if (type == QK_FLOAT32) {
        memcpy(&out[4 * i + j], &word, 4);
      } else {
        const uint16_t pair[2] = {(uint16_t)word, (uint16_t)(word >> 16)};
        for (int half = 0; half < 2; ++half) out[8 * i + 2 * j + half] = qk_from16(pair[half], type);
      }
    }
  }
}

__device__ __forceinline__ void qk_write(void* values, int type, int64_t at, float value) {
  if (type == QK_FLOAT32) {
    ((float*)values)[at] = value;
  } else if (type == QK_FLOAT16) {
    ((qk_half*)values)[at] = (qk_half)value;
  } else {  // bfloat16, round half to even; a NaN stays one
    union { float value; uint32_t bits; } wide = {value};
    const uint32_t rounded = wide.bits + 0x7fffu + ((wide.bits >> 16) & 1u);
    ((uint16_t*)values)[at] = value != value ? 0x7fc0 : (uint16_t)(rounded >> 16);
  }
}
