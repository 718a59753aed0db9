// Copies that leave the caches alone: stores that do not first read what they overwrite.
#pragma once

#include <emmintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tapchannel {

// From this size on a tap is not read back from a cache anyway, and an ordinary store would fetch
// each line before it overwrites it: a third of the memory traffic for nothing (bench/shm.py).
constexpr size_t kStreamingBytes = 2 << 20;

// The stores are weakly ordered: finish_streaming() before anything that says "landed".
inline void copy_streaming(uint8_t* to, const uint8_t* from, size_t bytes) {
  constexpr size_t kBlock = 64;
  size_t head = (kBlock - reinterpret_cast<uintptr_t>(to) % kBlock) % kBlock;
  if (head > bytes) head = bytes;
  std::memcpy(to, from, head);
  size_t at = head;
  for (; at + kBlock <= bytes; at += kBlock) {
    const auto* source = reinterpret_cast<const __m128i*>(from + at);
    auto* target = reinterpret_cast<__m128i*>(to + at);
    __m128i first = _mm_loadu_si128(source);
    __m128i second = _mm_loadu_si128(source + 1);
    __m128i third = _mm_loadu_si128(source + 2);
    __m128i fourth = _mm_loadu_si128(source + 3);
    _mm_prefetch(reinterpret_cast<const char*>(from + at + 1024), _MM_HINT_NTA);
    _mm_stream_si128(target, first);
    _mm_stream_si128(target + 1, second);
    _mm_stream_si128(target + 2, third);
    _mm_stream_si128(target + 3, fourth);
  }
  std::memcpy(to + at, from + at, bytes - at);
}

inline void finish_streaming() { _mm_sfence(); }

}  // namespace tapchannel
