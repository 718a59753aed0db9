// The producers: OutboxCore's calls and its progress thread, lives and deaths of a lane, and on a
// network the words that are carried between the two control blocks.
#include "rules.hpp"

namespace model {

// Step 3. A pass that was closed had all its credit.
bool Rules::covers(const Lane& lane, Word key) const {
  const ConsumerWords& theirs = heard(lane);
  if (pass_of(theirs.credit) == pass_of(word(key))) return count_of(theirs.credit) >= count_of(key);
  return pass_of(theirs.completed) == pass_of(word(key));
}

// Credit for the key will never come.
bool Rules::over(const Lane& lane, Word key) const {
  const ConsumerWords& theirs = heard(lane);
  int pass = pass_of(word(key));
  if (pass_of(theirs.aborted) >= pass) return true;
  if (!bug(Bug::epoch_ignored) && theirs.epoch != epoch_of(key)) return true;
  return pass_of(theirs.open) > pass && !covers(lane, key);
}

void Rules::give_up(Lane& lane, int pass) {
  lane.gave_up |= bit(pass);
  int kept = 0;
  for (int i = 0; i < lane.queued; ++i)
    if (pass_of(lane.queue[i]) != pass) lane.queue[kept++] = lane.queue[i];
  for (int i = kept; i < lane.queued; ++i) lane.queue[i] = 0;
  lane.queued = static_cast<uint8_t>(kept);
  if (pass == pass_of(make_word(lane.epoch, lane.step, 0))) lane.open = lane.dropped = 0;
}

void Rules::lane(const State& from, int index) {
  const Lane& lane = from.lane[index];
  life(from, index);
  if (lane.life != Life::attached) return;
  Word now = make_word(lane.epoch, lane.step, 0);
  carry(from, index);
  send(from, index);
  watch_queue(from, index);
  if (lane.open) {
    push(from, index);
    close_pass(from, index);
  } else {  // the trainer counts anew after a reset, and names no pass that will not come
    State next = from;
    Lane& made = next.lane[index];
    if (heard(lane).epoch != lane.epoch && !bug(Bug::epoch_ignored)) {
      made.epoch = heard(lane).epoch;
      made.step = 0;
    }
    if (made.step < from.consumer.last) {
      ++made.step;
      made.open = 1;
      made.next = made.dropped = 0;
      emit(next, 0, index, "opens pass", make_word(made.epoch, made.step, 0));
    }
  }
  State next = from;
  if (lane.open && spend(next)) {
    give_up(next.lane[index], pass_of(now));
    emit(next, 0, index, "aborts pass", now);
  }
  next = from;
  if (!lane.open && lane.queued && spend(next)) {
    while (next.lane[index].queued) give_up(next.lane[index], pass_of(next.lane[index].queue[0]));
    emit(next, 0, index, "aborts what it had closed");
  }
  next = from;
  if (lane.queued && !covers(lane, key_of(lane.queue[0])) && !over(lane, key_of(lane.queue[0])) &&
      spend(next)) {
    give_up(next.lane[index], pass_of(lane.queue[0]));
    give_up(next.lane[index], pass_of(now));
    emit(next, 3, index, "times out on credit for", lane.queue[0]);
  }
}

// A push never waits: with credit it goes ahead, without it is queued. Here every push is queued,
// and sent by the next step.
void Rules::push(const State& from, int index) {
  const Lane& lane = from.lane[index];
  if (lane.queued >= (config_.drop ? kQueue : config_.limit)) return;
  for (int m = 0; m < width(lane.step); ++m) {
    if (lane.next >> m & 1) continue;
    Word key = make_word(lane.epoch, lane.step, m + 1);
    State next = from;
    Lane& made = next.lane[index];
    if (over(lane, key)) {
      give_up(made, pass_of(key));
      return emit(next, 3, index, "is refused, leaves the pass of", key);
    }
    bool dropped = config_.drop && !covers(lane, key);
    made.next |= static_cast<uint8_t>(1 << m);
    made.queue[made.queued++] = key | (dropped ? kDropped : 0);
    const char* broken = nullptr;
    if (dropped && bug(Bug::drop_at_once)) {
      broken = overwrite(next, slot_of(key));
      for (Word& half : made.cell[slot_of(key)].half) half = key | kDropped;
    }
    emit(next, 3, index, dropped ? "drops" : "pushes", key, broken);
    if (!config_.any_order) return;
  }
}

// Steps 2, 5 and 6 of the first queued push that credit covers are begun.
void Rules::send(const State& from, int index) {
  const Lane& lane = from.lane[index];
  bool enqueued = config_.wire == Wire::cuda_ipc || config_.wire == Wire::staged;
  State next = from;
  Lane& made = next.lane[index];
  if (lane.announcing) {
    Cell& cell = made.cell[slot_of(key_of(lane.announcing))];
    made.announcing = 0;
    if (bug(Bug::announce_ahead)) {
      cell.puts.push(lane.announcing, config_.shared && index == 0 ? behind(from) : 0);
      return emit(next, 5, index, "enqueues the put of", lane.announcing);
    }
    cell.said = word(lane.announcing);
    return emit(next, 2, index, "announces", lane.announcing);
  }
  if (config_.wire == Wire::shm)  // the copy is made by the thread that sends
    for (const Cell& cell : lane.cell)
      if (cell.puts.count) return;
  int first = 0;
  while (first < lane.queued && !covers(lane, key_of(lane.queue[first])))
    first = bug(Bug::queue_in_order) ? lane.queued : first + 1;
  if (first >= lane.queued) return;
  Word key = lane.queue[first];
  Cell& cell = made.cell[slot_of(key_of(key))];
  // On a network puts have no mutual order.
  if (config_.wire == Wire::ucx && cell.puts.count) return;
  for (int i = first + 1; i < lane.queued; ++i) made.queue[i - 1] = made.queue[i];
  made.queue[--made.queued] = 0;
  Word said = bug(Bug::drop_unmarked) ? key_of(key) : key;
  if (bug(Bug::announce_ahead)) {
    cell.said = word(said);
    made.announcing = key;
    return emit(next, 2, index, "announces", key);
  }
  cell.puts.push(key, config_.shared && index == 0 ? behind(from) : 0);
  if (config_.fine && enqueued)
    made.announcing = said;
  else if (!config_.fine && config_.wire != Wire::ucx)
    cell.said = word(said);
  emit(next, 5, index, enqueued ? "enqueues the put of" : "begins the put of", key);
}

// Queued pushes whose pass is over go; the next call on the outbox says so.
void Rules::watch_queue(const State& from, int index) {
  const Lane& lane = from.lane[index];
  State next = from;
  Lane& made = next.lane[index];
  int kept = 0;
  for (int i = 0; i < lane.queued; ++i) {
    Word key = key_of(lane.queue[i]);
    if (!over(lane, key))
      made.queue[kept++] = lane.queue[i];
    else if (pass_of(key) == pass_of(make_word(lane.epoch, lane.step, 0)))
      made.dropped = made.open;
  }
  if (kept == lane.queued) return;
  for (int i = kept; i < lane.queued; ++i) made.queue[i] = 0;
  made.queued = static_cast<uint8_t>(kept);
  emit(next, 3, index, "drops pushes of a pass that is over");
}

void Rules::close_pass(const State& from, int index) {
  const Lane& lane = from.lane[index];
  if (lane.next != (1 << width(lane.step)) - 1) return;
  Word now = make_word(lane.epoch, lane.step, 0);
  bool sent = true;
  for (int i = 0; i < lane.queued; ++i) sent &= pass_of(lane.queue[i]) != pass_of(now);
  int ended = pass_of(heard(lane).aborted), mine = pass_of(word(now));
  State next = from;
  bool bad = ended == mine || (ended > mine && !sent) || lane.dropped;
  if (bad)
    give_up(next.lane[index], pass_of(now));
  else
    next.lane[index].open = 0;
  emit(next, 0, index, bad ? "finds aborted pass" : "closes pass", now);
}

void Rules::life(const State& from, int index) {
  const Lane& lane = from.lane[index];
  State next = from;
  Lane& made = next.lane[index];
  if (lane.life == Life::dead) {  // its pidfd turns readable: none of its puts lands any more
    made.life = Life::gone;
    for (Cell& cell : made.cell) cell.ghosts = Puts{};
    emit(next, 0, index, "process is gone");
  }
  if (lane.life != Life::attached) return attach(from, index);
  auto leave = [&made] {
    made.queued = made.open = made.next = made.dropped = made.announcing = 0;
    std::memset(made.queue, 0, sizeof(made.queue));
  };
  bool idle = lane.announcing == 0;
  for (const Cell& cell : lane.cell) idle &= cell.puts.count == 0;
  if (idle && spend(next)) {
    leave();
    made.life = Life::closed;
    emit(next, 0, index, "closes its outbox");
  }
  next = from;
  if (!spend(next)) return;
  leave();
  made.life = Life::dead;
  for (Cell& cell : made.cell) {
    if (config_.wire != Wire::shm && cell.ghosts.count == 0) cell.ghosts = cell.puts;
    cell.puts = Puts{};
  }
  emit(next, 0, index, "is killed");
}

void Rules::attach(const State& from, int index) {
  const Lane& lane = from.lane[index];
  const Consumer& mine = from.consumer;
  // Between hosts the mailbox ends the dead lane's endpoint: that is the fence.
  bool ends = config_.wire == Wire::ucx;
  if (lane.life == Life::dead && !ends && !bug(Bug::no_fence)) return;
  if (!bug(Bug::no_gate_fence) && !fenced(from, index)) return;
  State next = from;
  Lane& made = next.lane[index];
  if (mine.open && lane.ever && lane.attached_in == pass(mine) && !bug(Bug::restart_joins))
    made.barred = pass(mine);
  if (mine.open) made.attached_in = pass(mine);
  bool first = !lane.ever;
  if (!first && !bug(Bug::restart_hides_loss)) fail_waits(next, index);
  made.attached = made.ever = 1;
  made.lost = 0;
  made.gave_up = made.gave_up_heard = 0;
  if (!first || bug(Bug::attach_ends_credit)) made.words.completed = 0;
  store_lane_words(next.consumer, made);
  made.heard = config_.wire == Wire::ucx ? made.words : ConsumerWords{};
  made.life = Life::attached;
  made.direct = !first && config_.direct;
  for (Cell& cell : made.cell) {
    cell.arrival = 0;
    if (ends && !bug(Bug::no_fence)) cell.ghosts = Puts{};
  }
  bool barred = mine.open && made.barred == pass(mine);
  made.epoch = mine.epoch;
  // Its trainer begins with the first pass of this life of the mailbox, or joins the one of now.
  made.step = first ? mine.base : static_cast<uint8_t>(mine.step - (mine.open && !barred));
  emit(next, 0, index, barred ? "attaches, sits out pass" : "attaches in pass", pass(mine));
}

// Rounds: what was stored first has arrived before what was stored later is put.
void Rules::carry(const State& from, int index) {
  if (config_.wire != Wire::ucx) return;
  State next = from;
  Lane& lane = next.lane[index];
  const ConsumerWords& said = lane.words;
  ConsumerWords& heard = lane.heard;
  bool ended = said.epoch != heard.epoch || said.completed != heard.completed ||
               said.aborted != heard.aborted;
  bool begun = said.credit != heard.credit || said.open != heard.open;
  if (bug(Bug::credit_carried_first)) ended &= !begun;
  if (ended) {
    heard.epoch = said.epoch;
    heard.completed = said.completed;
    heard.aborted = said.aborted;
  } else if (begun) {
    heard.credit = said.credit;
    heard.open = said.open;
  }
  if (ended || begun) emit(next, ended ? 0 : 1, index, "hears the consumer's words");
  if (lane.gave_up == lane.gave_up_heard) return;
  next = from;
  lane.gave_up_heard = lane.gave_up;
  emit(next, 0, index, "has told of its abort");
}

}  // namespace model
