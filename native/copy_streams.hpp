// The copy streams of one GPU: copies and words that are written behind them, and how to learn what
// of it has been performed.
#pragma once

#include <array>
#include <mutex>

#include "block.hpp"
#include "cuda_memory.hpp"

namespace tapchannel::cuda {

// Two streams, by track: the next message's copy runs while this one's word waits for its fence.
// One track always uses the same stream, so late copies of a dead pass stay before newer ones.
class CopyStreams {
 public:
  explicit CopyStreams(Device device);
  ~CopyStreams();  // does not wait: finish() first
  CopyStreams(const CopyStreams&) = delete;
  CopyStreams& operator=(const CopyStreams&) = delete;

  CUstream of(size_t track) const { return streams_[track % kStreams]; }
  // Writes a 64-bit word once all that stands on the track's stream has been performed; the default
  // fence orders the two at system scope. The device's context must be current.
  void write(size_t track, CUdeviceptr word, std::uint64_t value);
  // Asks to be told, through performed(), when all words so far have been written.
  void mark();
  std::uint64_t performed() const;  // how many words are known to have been written
  bool finish(std::uint64_t limit_ns);

 private:
  static constexpr size_t kStreams = 2;
  Device device_;
  // performed: one private word a stream, written by it behind the others, when asked by mark().
  //   writer the GPU; reader this process; order: stream order behind the word, load acquire;
  //   visible: the copies have read their sources and written their targets. Without it close()
  //   could not tell when nothing is in flight, and a poisoned stamp would hide a copy's end.
  PinnedPage performed_;
  std::array<CUstream, kStreams> streams_{};
  std::mutex mutex_;  // over the two below
  std::uint64_t written_ = 0, marked_ = 0;
};

// One end of a copy between host and GPU, or between GPUs. `host` is set where it is host memory.
struct Rows {
  CUdeviceptr address = 0;
  std::uint8_t* host = nullptr;
  std::size_t pitch = 0;
};

// Host memory must be registered, or the copy would hold up the calling thread.
void enqueue_rows(const Rows& to, const Rows& from, std::size_t row_bytes, std::size_t rows,
                  CUstream stream);

}  // namespace tapchannel::cuda
