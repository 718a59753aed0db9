// Leases: their way back (step 9), and the poison of those whose wait has failed.
#include "rules.hpp"

namespace model {

// Leases end in any order, in their pass or long after it.
void Rules::drop(const State& from) {
  for (int i = 0; i < from.consumer.leases; ++i) {
    const Lease& lease = from.consumer.lease[i];
    if (lease.released) continue;
    State next = from;
    if (on_host()) {
      const char* broken = misread(from, lease.key, true);  // read until now
      erase(next, i);
      emit(next, 9, -1, "releases", lease.key, broken);
    } else {
      Consumer& mine = next.consumer;
      within(mine.ops < kOps);
      mine.lease[i].released = 1;
      mine.op[mine.ops++] = {Op::release, lease.key, 0};
      emit(next, 9, -1, "enqueues the release of", lease.key);
    }
  }
}

// The slot is free: step 1 of a later key.
void Rules::erase(State& state, int index) const {
  Consumer& mine = state.consumer;
  Word key = mine.lease[index].key;
  for (int i = index + 1; i < mine.leases; ++i) mine.lease[i - 1] = mine.lease[i];
  mine.lease[--mine.leases] = Lease{};
  if (mine.open && pass_of(key) == pass_of(pass(mine))) mine.received[count_of(key) - 1] = 2;
  advance(state);
}

void Rules::fail(State& state, int index) const {
  Lease& lease = state.consumer.lease[index];
  lease.waiting = 0;
  lease.failed = lease.doomed = 1;
  if (may_poison(state, index)) poison(state, lease);
}

// Its next life begins: what still waits for the last one is told now.
void Rules::fail_waits(State& state, int index) const {
  for (int i = 0; i < state.consumer.leases; ++i) {
    const Lease& lease = state.consumer.lease[i];
    const Cell& cell = state.lane[index].cell[slot_of(lease.key)];
    bool said = key_of(cell.said) == word(lease.key);
    bool underway = staged(state.lane[index]) &&
                    (cell.passed == lease.key || (cell.arrival == lease.key && said));
    if (!lease.waiting || underway || (reached(cell.stamp, word(lease.key)) && said)) continue;
    fail(state, i);
    state.consumer.failed = 1;
  }
}

// Neither the pattern nor the word may reach an older lease on the slot, which may be a good one.
bool Rules::may_poison(const State& state, int index) const {
  const Consumer& mine = state.consumer;
  for (int i = 0; i < index && !bug(Bug::poison_at_once); ++i)
    if (slot_of(mine.lease[i].key) == slot_of(mine.lease[index].key)) return false;
  return true;
}

// First the pattern is begun, then the words that let the stream go on are stored; the pattern may
// be performed later.
void Rules::poison(State& state, Lease& lease) const {
  int slot = slot_of(lease.key);
  for (int i = 0; i < config_.lanes; ++i)
    if (!reached(state.lane[i].cell[slot].stamp, word(lease.key)))
      state.consumer.fill[slot] |= static_cast<uint8_t>(1 << i);
  static_cast<void>(poison_words(state, lease));
  lease.doomed = 0;
}

bool Rules::poison_words(State& state, const Lease& lease) const {
  bool any = false;
  for (int i = 0; i < config_.lanes; ++i) {
    Word& stamp = state.lane[i].cell[slot_of(lease.key)].stamp;
    if (landed(stamp, word(lease.key))) continue;
    stamp = word(lease.key) | kPoison;
    any = true;
  }
  return any;
}

}  // namespace model
