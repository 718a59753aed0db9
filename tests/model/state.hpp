// The model's state: the words of native/control_block.hpp in small, and what each process has in
// hand.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace model {

constexpr int kLanes = 2, kDepth = 3, kWidth = 4;
constexpr int kQueue = 4, kPuts = 3, kLeases = 8, kOps = 24;

// The arrays hold whatever the rules can put in them; a rule that breaks that is a bug here.
inline void within(bool bounds) {
  if (!bounds) throw std::length_error("a state of the model is too small for its rules");
}

// A stamp in small: poison 1 bit | epoch 2 | step 2 | microbatch + 1 3. Compared as the real one
// is.
using Word = uint8_t;
constexpr Word kPoison = 0x80;
constexpr Word kDropped = 0x80;  // of an announce, a queued push, a payload: dropped, not pushed
constexpr Word kPattern = 0xff;  // a payload that is the poison pattern
constexpr Word make_word(int epoch, int step, int count) {
  return static_cast<Word>(epoch << 5 | step << 3 | count);
}
constexpr int epoch_of(Word word) { return (word & 0x7f) >> 5; }
constexpr int pass_of(Word word) { return (word & 0x7f) >> 3; }  // (epoch, step)
constexpr int count_of(Word word) { return word & 7; }
constexpr Word key_of(Word word) { return word & 0x7f; }
constexpr bool landed(Word word, Word key) { return word >= key; }  // the GPU's GEQ
constexpr bool reached(Word word, Word key) { return landed(word, key) && !(word & kPoison); }

// Puts of one cell on their way, oldest first. `done` says which parts of the oldest have been
// performed. A put that was enqueued behind a stream wait of its own process, with one connection,
// stays behind it: `behind` counts what the stream has to perform first.
struct Puts {
  Word key[kPuts];
  uint8_t behind[kPuts];
  uint8_t done, count;
  void push(Word put, uint8_t after) {
    within(count < kPuts);
    key[count] = put;
    behind[count++] = after;
  }
  void pop() {
    for (int i = 1; i < count; ++i) key[i - 1] = key[i], behind[i - 1] = behind[i];
    --count;
    key[count] = behind[count] = done = 0;
  }
};

// The consumer's words, one set a lane.
struct ConsumerWords {
  Word epoch, open, credit, completed, aborted;
};

enum class Life : uint8_t { absent, attached, dead, gone, closed };

struct Cell {
  Word stamp, said;            // said: the announce's key, with its flag
  Word half[2];                // the payload in the slot
  Word staged[2], arrival;     // on its way through the gate
  Word passed;                 // the gate's own
  Puts puts, ghosts, carried;  // the lane's; those of its last life; the gate's
};

struct Lane {
  Cell cell[kDepth];
  ConsumerWords words, heard;      // as stored, and as the producer sees them
  uint8_t gave_up, gave_up_heard;  // bit (epoch, step): the producer's last aborted passes
  Life life;
  uint8_t attached, lost, ever;  // as the consumer knows
  uint8_t direct;                // came back by a wire that writes the slots itself
  Word barred, attached_in;      // passes
  // the producer's host
  uint8_t epoch, step, open, next, dropped;
  uint8_t queued;
  Word queue[kQueue];
  Word announcing;  // enqueued, its announce not written yet
};

struct Lease {
  Word key;
  uint8_t waiting, failed, doomed, released, performed;  // doomed: its poison is still to come
  uint8_t wrong;  // a stream may have read other bytes, and how its wait ended is not known yet
};

enum class Op : uint8_t { none, wait, read, release };
struct StreamOp {
  Op op;
  Word key;
  uint8_t lanes;  // whose stamps are waited for
};

struct Consumer {
  uint8_t epoch, step, left, last, base, open, granted, failed;  // base: the step before its first
  uint8_t received[kWidth];                                      // 0 no, 1 leased, 2 released
  uint8_t leases, ops;
  Lease lease[kLeases];
  StreamOp op[kOps];
  uint8_t fill[kDepth];  // lanes whose poison pattern in this slot is still to be performed
  Word gate;             // what the gate was told to have credit
};

struct State {
  Lane lane[kLanes];
  Consumer consumer;
  uint8_t faults;
};
static_assert(alignof(State) == 1);

inline bool operator==(const State& a, const State& b) {
  return std::memcmp(&a, &b, sizeof(State)) == 0;
}

}  // namespace model
