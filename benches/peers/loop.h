// The measuring loop that all peers share; the same as in the native benchmark of tpu_dist
// (crates/runtime/benches/collectives.rs): the median over blocks of calls, on rank 0.
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { kBlocks = 15 };

static double now_us(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e6 + (double)time.tv_nsec * 1e-3;
}

static int by_value(const void* a, const void* b) {
  const double x = *(const double*)a, y = *(const double*)b;
  return (x > y) - (x < y);
}

// Bytes, as 8, 64K or 1M.
static size_t parse_size(const char* text) {
  char* end = NULL;
  const size_t number = strtoull(text, &end, 10);
  return *end == 'K' ? number << 10 : *end == 'M' ? number << 20 : number;
}

// `call` runs the operation once; `share` makes rank 0's number everybody's.
typedef void (*Call)(void* state);
typedef void (*Share)(void* state, long* number);

static double measure_us(Call call, Share share, void* state) {
  call(state);
  const double begin = now_us();
  for (int i = 0; i < 3; ++i) {
    call(state);
  }
  const double once = (now_us() - begin) / 3;
  long count = (long)(3e3 / once);
  count = count < 1 ? 1 : count > 2000 ? 2000 : count;
  share(state, &count);
  double blocks[kBlocks];
  for (int block = 0; block < kBlocks; ++block) {
    const double start = now_us();
    for (long i = 0; i < count; ++i) {
      call(state);
    }
    blocks[block] = (now_us() - start) / (double)count;
  }
  qsort(blocks, kBlocks, sizeof(double), by_value);
  return blocks[kBlocks / 2];
}

// Memory whose pages have been touched.
static void* filled(size_t bytes) {
  void* memory = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
  memset(memory, 0, bytes);
  return memory;
}
