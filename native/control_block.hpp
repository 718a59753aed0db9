// The control block: every word that two processes share for one lane, laid out once.
//
// One block a lane, in a sealed memfd that the mailbox makes and both processes map; with CUDA both
// register it, so that the very words that a GPU waits on can be read and poisoned by a CPU. Python
// checks these offsets at import (layout()).
//
//   header | consumer's words | producer's words | stamps[depth][cells] | announces[depth][cells] |
//   two recorder rings
//
// Five lines beside each shared word: who writes, who reads, order and scope, what becomes visible,
// what breaks without it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tapchannel {

constexpr uint64_t kMagic = 0x314b4c4250415431ULL;  // "1TAPBLK1"
constexpr uint32_t kLayoutVersion = 2;
constexpr size_t kLine = 64;
constexpr uint32_t kRingEntries = 1024;
constexpr uint32_t kMaxDims = 8;
constexpr uint32_t kMaxDepth = 4096;
constexpr uint32_t kMaxCells = 4096;
constexpr size_t kTextBytes = 248;
constexpr size_t kAbortsKept = 8;

// ---- stamp arithmetic (the same as tapchannel/keys.py; layout() lets Python check it)
// bit 63 = 0 | bit 62 poison | 16 bits epoch | 28 bits step | 18 bits microbatch + 1
constexpr int kMicrobatchBits = 18;
constexpr int kStepBits = 28;
constexpr int kEpochBits = 16;
constexpr uint64_t kPoison = 1ULL << 62;

constexpr uint64_t make_stamp(uint64_t epoch, uint64_t step, uint64_t count) {
  return (epoch << (kStepBits + kMicrobatchBits)) | (step << kMicrobatchBits) | count;
}
constexpr uint64_t pass_of(uint64_t word) {
  return (word & ~kPoison) >> kMicrobatchBits;
}  // (epoch, step)
constexpr uint64_t count_of(uint64_t word) { return word & ((1ULL << kMicrobatchBits) - 1); }
constexpr uint64_t epoch_of(uint64_t word) {
  return (word & ~kPoison) >> (kStepBits + kMicrobatchBits);
}
// The GPU's GEQ: a cyclic signed compare. A poisoned word satisfies every wait, which is what frees
// a stuck stream.
constexpr bool landed(uint64_t word, uint64_t stamp) {
  return static_cast<int64_t>(word - stamp) >= 0;
}

// What a host takes for landed: poison ends waits, but it is no data.
constexpr bool reached(uint64_t word, uint64_t stamp) {
  return landed(word, stamp) && (word & kPoison) == 0;
}

struct alignas(kLine) Word {
  std::atomic<uint64_t> value{0};
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(Word) == kLine);

// A bell lets a thread of the other process sleep until something changed.
//   writers  the side that changed a word; reader: the sleeping side
//   order    count: fetch_add seq_cst after the change; sleepers: fetch_add seq_cst before the last
//   look scope    both processes (futex on the shared page); never touched by a GPU visible nothing
//   by itself: the sleeper looks at the words again without  the seq_cst pair, a ring between the
//   last look and the sleep is lost until the sleeper's tick ends
struct alignas(kLine) Bell {
  std::atomic<uint32_t> count{0};
  std::atomic<uint32_t> sleepers{0};
};

// Why a pass was aborted; written before the aborted word of the same side is stored (release),
// read after it was loaded (acquire). The next abort may write while the last one's is read, by the
// peer or by a lane's own thread: hence atomic (relaxed) bytes. Bounded and never trusted: a torn
// or foreign text is only ever printed.
struct alignas(kLine) Text {
  std::atomic<uint32_t> length{0};
  std::atomic<char> bytes[kTextBytes]{};
};
static_assert(std::atomic<char>::is_always_lock_free && sizeof(Text) == 4 * kLine);

struct alignas(kLine) BlockHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t lane;
  uint32_t depth;
  uint32_t cells;
  uint64_t total_bytes;
  uint8_t mailbox_id[16];
};
static_assert(sizeof(BlockHeader) == kLine);

enum class LaneState : uint64_t { empty = 0, attached = 1, closed = 2, revoked = 3 };

// Written by the consumer, read by the lane's producer. All stores release, all loads acquire,
// scope: two CPUs.
struct ConsumerWords {
  Word epoch;  // this life of the mailbox. Without it a push of an earlier life would pass for one
               // of this.
  Word open_pass;  // (epoch, step, microbatches). Shows a producer that both sides count the same
                   // pass.
  // credit: (epoch, step, microbatches granted).
  //   writer consumer's host, in key order, after the slot's reads were performed (step 9); reader
  //   the lane's host (step 3) order  store release / load acquire, system scope is not needed: no
  //   GPU reads it visible the end of every read of the slot's former contents without it the lane
  //   overwrites a slot under its reader (I2)
  Word credit;
  // completed: (epoch, step, 1) of the last pass that was closed, all of it granted. The consumer
  // may open the next pass while pushes of this one are still on their way: they keep their credit.
  Word completed;
  Word aborted;  // (epoch, step): passes up to this are over. Without it a dead pass's queue would
                 // still be sent.
  Word state;    // LaneState::closed once the mailbox closes, revoked once it lets the lane go.
  Word heartbeat;  // CLOCK_MONOTONIC ns of the last tick; only ever printed.
  Bell bell;       // rung by the consumer for the lane's progress thread
  Text reason;
  Word beat;  // between hosts, whose clocks differ: counts up, and each change is a heartbeat
};

// Written by the lane's producer, read by the consumer. All stores release, all loads acquire,
// scope: two CPUs.
struct ProducerWords {
  Word open_pass;  // (epoch, step, microbatches); compared with the consumer's own
  // The last passes that the producer gave up, each (epoch, step, 1). Several, since a producer may
  // be passes ahead of its consumer: an abort of its newest pass must not end the consumer's older
  // one, whose pushes are complete.
  Word aborted[kAbortsKept];
  Word state;  // LaneState; closed = no copy of this process is in flight any more
  Word heartbeat;
  Bell bell;  // rung by the lane for a consumer thread that waits on its host
  Text reason;
  Word beat;  // as the consumer's
};

// stamp (one 64-bit word a cell and slot):
//   writer  the lane, after the payload (step 6); the consumer's watchdog, to poison a word that a
//   stream waits on reader  the consumer's stream (cuStreamWaitValue64 GEQ), its host threads, both
//   sides' inspection order   shm: store release; cuda_ipc: cuStreamWriteValue64 with its default
//   system-scope fence, behind the copy on the
//           same stream. Loads acquire, system scope
//   visible every payload byte of this cell for this key
//   without the reader can see key n's stamp over the bytes of key n - depth (I1)

constexpr uint32_t kDropped = 1, kChecksummed = 2;  // announce flags

// announce (one a cell and slot), step 2. Its place is the slot's, so it is written once credit
// covers the key.
//   writer  the lane's host; reader the consumer's host
//   order   fields first, then key with store release; reader loads key acquire, copies, loads key
//   again visible rows, shape, dtype of what the cell will hold without a reader could size its
//   view by another key's rows
struct alignas(kLine) Announce {
  std::atomic<uint64_t> key{0};
  uint64_t rows;
  uint64_t row_begin;
  uint32_t dtype;
  uint32_t ndim;
  uint64_t shape[kMaxDims];
  uint32_t flags;
  uint32_t checksum;
};
static_assert(sizeof(Announce) == 2 * kLine);

// Flight recorder: one ring a side; its writer is that side's process alone.
struct Event {
  uint64_t time_ns;  // CLOCK_MONOTONIC
  uint64_t key;
  uint64_t bytes;
  uint16_t step;
  uint16_t cell;
  std::atomic<uint32_t>
      number;  // low bits of the event's number + 1, stored last: a reader drops torn entries
};
static_assert(sizeof(Event) == 32);

struct alignas(kLine) Ring {
  Word next;
  Event entries[kRingEntries];
};

enum class Step : uint16_t {
  grant = 1,
  announce = 2,
  claim = 3,
  order = 4,
  put = 5,
  stamp = 6,
  wait = 7,
  read = 8,
  release = 9,
  open_pass = 10,
  close_pass = 11,
  abort = 12,
  poison = 13,
  attach = 14,
  lost = 15,
  close = 16,
};

constexpr size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Offsets follow from (depth, cells) alone: neither side ever believes an offset that the other
// wrote.
struct BlockLayout {
  size_t depth, cells;
  constexpr size_t consumer() const { return sizeof(BlockHeader); }
  constexpr size_t producer() const { return consumer() + round_up(sizeof(ConsumerWords), kLine); }
  constexpr size_t stamps() const { return producer() + round_up(sizeof(ProducerWords), kLine); }
  constexpr size_t announces() const {
    return stamps() + round_up(depth * cells * sizeof(uint64_t), kLine);
  }
  constexpr size_t consumer_ring() const { return announces() + depth * cells * sizeof(Announce); }
  constexpr size_t producer_ring() const { return consumer_ring() + sizeof(Ring); }
  constexpr size_t bytes() const { return round_up(producer_ring() + sizeof(Ring), 4096); }
};

}  // namespace tapchannel
