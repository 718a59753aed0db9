// A small channel in this process, for one input.
#pragma once

#include <sys/socket.h>

#include "input.hpp"
#include "mailbox.hpp"
#include "outbox.hpp"

namespace fuzz {

using namespace tapchannel;

constexpr uint32_t kDepth = 2, kCells = 2, kLanes = 2;
constexpr uint64_t kRows = 3, kRowBytes = 8, kPitch = kRowBytes * kCells * kLanes;
constexpr uint64_t kSlotBytes = kPitch * kRows;
constexpr std::array<uint8_t, 16> kId{1, 2, 3};

inline std::vector<CellGeometry> cells_of(uint32_t lane) {
  std::vector<CellGeometry> cells;
  for (uint32_t i = 0; i < kCells; ++i) {
    CellGeometry cell;
    cell.offset = (lane * kCells + i) * kRowBytes;
    cell.row_bytes = kRowBytes;
    cell.pitch = kPitch;
    cell.row_limit = cell.tap_rows = kRows;
    cell.dtype = 1;
    cell.tap = lane * kCells + i;
    cell.width = 4;
    cells.push_back(cell);
  }
  return cells;
}

// Words that a rule may be about, and any other.
inline uint64_t word_from(Input& input) {
  uint64_t key = make_stamp(input.below(3), input.below(4), input.below(5));
  switch (input.below(8)) {
    case 0:
      return input.take<uint64_t>();
    case 1:
      return key | kPoison;
    case 2:
      return key | 1ULL << 63;
    case 3:
      return input.below(8);
    case 4:
      return ~static_cast<uint64_t>(input.below(8));
    default:
      return key;
  }
}

// Any aligned word of the block that the peer may write: all of it is mapped by both.
inline void scribble(Input& input, const ControlBlock& block) {
  size_t words = block.memory().bytes() / sizeof(uint64_t);
  size_t rings = block.offset_of(&block.consumer_ring()) / sizeof(uint64_t);
  size_t stamps = block.offset_of(&block.stamp(0, 0)) / sizeof(uint64_t);
  size_t at = 0;
  switch (input.below(3)) {
    case 0:
      at = input.take<uint16_t>() % words;
      break;
    case 1:
      at = sizeof(BlockHeader) / 8 + input.take<uint16_t>() % (stamps - sizeof(BlockHeader) / 8);
      break;
    default:
      at = stamps + input.take<uint8_t>() % (rings - stamps);
  }
  reinterpret_cast<std::atomic<uint64_t>*>(block.memory().base())[at].store(word_from(input));
}

// A peer that stays connected until it goes.
class Connected {
 public:
  Connected() { must(socketpair(AF_UNIX, SOCK_STREAM, 0, ends_) == 0, "a socket pair can be had"); }
  ~Connected() { ::close(ends_[1]); }
  Connected(const Connected&) = delete;
  int ours() const { return ends_[0]; }  // the core's to close

 private:
  int ends_[2]{};
};

}  // namespace fuzz
