// The consumer's host: MailboxCore's calls, each under its lock and so one step here.
#include "rules.hpp"

namespace model {

State Rules::first() const {
  State state{};
  state.consumer.epoch = 1;
  state.consumer.left = state.consumer.last = static_cast<uint8_t>(config_.passes);
  state.faults = static_cast<uint8_t>(config_.faults);
  return state;
}

void Rules::consumer(const State& from) {
  const Consumer& mine = from.consumer;
  for (int i = 0; i < config_.lanes; ++i)  // watch_lane: a socket's end, a state word
    if (from.lane[i].attached && from.lane[i].life != Life::attached) {
      State next = from;
      next.lane[i].attached = 0;
      next.lane[i].lost = from.lane[i].life != Life::closed;
      emit(next, 0, i, "is found gone");
    }
  if (mine.failed) {
    State next = from;
    end_pass(next);
    next.consumer.failed = 0;
    emit(next, 0, -1, "aborts the failed pass");
  } else if (!mine.open) {
    open(from);
  } else {
    for (int m = 0; m < width(mine.step); ++m)
      if (mine.received[m] == 0) {
        receive(from, m);
        break;
      }
    close(from);
  }
  drop(from);
  disturb(from);
}

// What a lane is told when a pass is opened, when it attaches, and after a reset.
void Rules::store_lane_words(Consumer& mine, Lane& lane) const {
  bool barred = mine.open && lane.barred == pass(mine);
  lane.words.epoch = mine.epoch;
  if (barred) lane.words.aborted = word(pass(mine));
  lane.words.credit =
      mine.open && !barred ? word(make_word(mine.epoch, mine.step, mine.granted)) : 0;
  lane.words.open = mine.open ? word(pass(mine)) : 0;
}

void Rules::open(const State& from) {
  if (from.consumer.left == 0) return;
  for (int i = 0; i < config_.lanes; ++i)
    if (from.lane[i].lost) return;  // wait_ready, until it has attached again
  State next = from;
  Consumer& mine = next.consumer;
  --mine.left;
  ++mine.step;
  mine.granted = 0;
  std::memset(mine.received, 0, sizeof(mine.received));
  mine.open = 1;
  mine.gate = make_word(mine.epoch, mine.step, 0);
  for (int i = 0; i < config_.lanes; ++i) {
    if (next.lane[i].attached) next.lane[i].attached_in = pass(mine);
    store_lane_words(mine, next.lane[i]);
  }
  advance(next);
  emit(next, 1, -1, "opens and grants", make_word(mine.epoch, mine.step, mine.granted));
}

// What keeps a microbatch from being granted. hard: what is on its way back in stream order is left
// out.
bool Rules::blocked(const State& state, int microbatch, bool hard) const {
  const Consumer& mine = state.consumer;
  for (int m = hard ? mine.granted : microbatch; m <= microbatch; ++m) {
    if (m >= config_.depth && mine.received[m - config_.depth] == 0) return true;
    for (int i = 0; i < mine.leases; ++i) {
      const Lease& lease = mine.lease[i];
      bool same = pass_of(lease.key) == pass_of(pass(mine));
      bool older = !same || count_of(lease.key) - 1 < m;
      if (slot_of(lease.key) != m % config_.depth || !older) continue;
      if (bug(Bug::credit_early) || (bug(Bug::credit_over_passes) && !same)) continue;
      if (!hard || !lease.released) return true;
    }
  }
  return false;
}

// Step 1, in key order.
void Rules::advance(State& state) const {
  Consumer& mine = state.consumer;
  if (!mine.open || mine.failed) return;
  int before = mine.granted;
  while (mine.granted < width(mine.step) && !blocked(state, mine.granted, false)) {
    for (int i = 0; i < config_.lanes; ++i) {  // strip_poison
      Word& stamp = state.lane[i].cell[mine.granted % config_.depth].stamp;
      if ((stamp & kPoison) && !bug(Bug::poison_kept)) stamp = 0;
    }
    ++mine.granted;
  }
  if (mine.granted == before) return;
  mine.gate = make_word(mine.epoch, mine.step, mine.granted);
  for (int i = 0; i < config_.lanes; ++i)
    if (state.lane[i].barred != pass(mine)) state.lane[i].words.credit = word(mine.gate);
}

void Rules::receive(const State& from, int microbatch) {
  const Consumer& mine = from.consumer;
  Word key = make_word(mine.epoch, mine.step, microbatch + 1);
  bool stamps = on_host() || config_.recv == Recv::host;
  bool announces = config_.recv != Recv::named;
  Want want = Want::nothing;
  if (given_up(from, key)) {
    want = Want::fault;
  } else {
    if (mine.granted <= microbatch) {
      bool hard = blocked(from, microbatch, true) && !bug(Bug::wait_for_held);
      bool poisoned = false;
      for (int i = 0; i < config_.lanes; ++i)
        poisoned |= (from.lane[i].cell[slot_of(key)].stamp & kPoison) != 0;
      for (int i = 0; i < mine.leases && !bug(Bug::ahead_of_poison); ++i)
        poisoned |= slot_of(mine.lease[i].key) == slot_of(key) && mine.lease[i].failed;
      if (hard || stamps || announces || poisoned) want = Want::more;
    }
    if (want == Want::nothing) want = unmet(from, key, stamps, announces);
  }
  State next = from;
  if (want == Want::fault) {
    next.consumer.failed = 1;
    return emit(next, 7, -1, "fails to receive", key);
  }
  if (want == Want::more) {
    if (!spend(next)) return;
    next.consumer.failed = 1;
    return emit(next, 7, -1, "times out on", key);
  }
  within(mine.leases < kLeases && mine.ops + 2 <= kOps);
  Lease& lease = next.consumer.lease[next.consumer.leases++];
  lease.key = key;
  uint8_t awaited = 0;
  for (int i = 0; i < config_.lanes; ++i)
    if (!reached(from.lane[i].cell[slot_of(key)].stamp, word(key)))
      awaited |= static_cast<uint8_t>(1 << i);
  lease.waiting = awaited != 0;
  next.consumer.received[microbatch] = 1;
  const char* broken = nullptr;
  if (on_host()) {
    broken = misread(next, key, true);
  } else {
    Consumer& made = next.consumer;
    if (awaited) made.op[made.ops++] = {Op::wait, key, awaited};
    made.op[made.ops++] = {Op::read, key, 0};
    broken = read_on(next);
  }
  emit(next, 7, -1, awaited ? "enqueues a wait and a read of" : "receives", key, broken);
}

void Rules::close(const State& from) {
  const Consumer& mine = from.consumer;
  for (int m = 0; m < width(mine.step); ++m)
    if (mine.received[m] == 0) return;
  if (mine.granted != width(mine.step)) return;  // wait_granted
  for (int i = 0; i < mine.leases; ++i)          // the word that keeps its credit is about to go
    if (mine.lease[i].waiting && pass_of(mine.lease[i].key) != pass_of(pass(mine)) &&
        !bug(Bug::next_ends_credit))
      return;
  State next = from;
  next.consumer.open = 0;
  next.consumer.gate = 0;
  for (int i = 0; i < config_.lanes; ++i)
    if (next.lane[i].barred != pass(mine) && !bug(Bug::close_ends_credit))
      next.lane[i].words.completed = word(pass(mine));
  emit(next, 0, -1, "closes pass", pass(mine));
}

void Rules::end_pass(State& state) const {
  Consumer& mine = state.consumer;
  mine.open = 0;
  mine.gate = 0;
  for (int i = 0; i < mine.leases; ++i)
    if (mine.lease[i].waiting) fail(state, i);
  for (int i = 0; i < config_.lanes; ++i) {
    state.lane[i].words.aborted = word(pass(mine));
    state.lane[i].words.credit = 0;
  }
  std::memset(mine.received, 0, sizeof(mine.received));
}

// What happens to a consumer that did nothing wrong; each takes one of the run's faults.
void Rules::disturb(const State& from) {
  const Consumer& mine = from.consumer;
  State next = from;
  if (mine.open && !mine.failed && spend(next)) {
    end_pass(next);
    emit(next, 0, -1, "aborts pass", pass(mine));
  }
  next = from;
  if (mine.epoch == 1 && (mine.left != 0 || mine.open) && spend(next)) {
    end_pass(next);
    Consumer& reset = next.consumer;
    reset.failed = 0;
    ++reset.epoch;
    reset.step = reset.base = 0;
    reset.last = reset.left;
    for (int i = 0; i < config_.lanes; ++i) store_lane_words(reset, next.lane[i]);
    emit(next, 0, -1, "resets");
  }
  if (mine.left != 0 || mine.open) crash_consumer(from);
}

// A new mailbox in new memory; what the lanes' last lives still do, they do to the old memory.
void Rules::crash_consumer(const State& from) {
  State next = from;
  if (!spend(next)) return;
  Consumer& mine = next.consumer;
  uint8_t step = mine.step, left = mine.left, last = mine.last;
  mine = Consumer{};
  mine.epoch = 1;
  mine.step = mine.base = step;
  mine.left = left;
  mine.last = last;
  for (int i = 0; i < config_.lanes; ++i) {
    Lane kept = next.lane[i];
    next.lane[i] = Lane{};
    if (!bug(Bug::old_memory)) continue;
    for (int slot = 0; slot < config_.depth; ++slot) {
      Cell& cell = next.lane[i].cell[slot];
      cell = kept.cell[slot];
      if (kept.life == Life::attached) cell.ghosts = cell.puts;
      cell.puts = cell.carried = Puts{};
      cell.passed = cell.arrival = 0;
    }
  }
  emit(next, 0, -1, "is killed and starts anew");
}

}  // namespace model
