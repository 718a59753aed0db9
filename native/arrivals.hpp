// Arrival words: they say that a payload has come as far as the staging memory. The gate reads
// them; the slots' stamps follow.
//
// One sealed memfd for each lane that a gate serves, laid out as the lane's stamps are:
// [depth][cells]. Its size follows from (depth, cells) alone, and nothing in it is ever used as a
// size or an index.
#pragma once

#include "control_block.hpp"
#include "mapping.hpp"

namespace tapchannel {

// arrival (one 64-bit word a cell and slot; holds a key, compared for equality only):
//   writer  the lane, behind the payload in the staging cell; the consumer's host clears them at
//   attach, when no life of the lane writes
//   reader  the consumer's gate
//   order   on the host a store release; by a GPU cuStreamWriteValue64 behind the copy on the
//           same stream (default system-scope fence). Load acquire
//   visible every payload byte of this cell for this key, in the staging memory
//   without the gate would carry half a tap, or the one before, into the slot and stamp it (I1)
constexpr size_t arrival_bytes(size_t depth, size_t cells) {
  return round_up(depth * cells * sizeof(uint64_t), 4096);
}

inline std::atomic<uint64_t>& arrival(const Mapping& memory, size_t index) {
  return reinterpret_cast<std::atomic<uint64_t>*>(memory.base())[index];
}

}  // namespace tapchannel
