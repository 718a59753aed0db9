// recv: the wait for the awaited stamps, and the lease (steps 7 and 8).
#include "mailbox.hpp"

namespace tapchannel {

namespace {
constexpr uint64_t kTick = 20000000ULL;  // 20 ms: heartbeat and lane watch
constexpr uint64_t kNap = 10000ULL;      // first nap between looks at words that only a GPU writes
constexpr uint64_t kLongestNap = 100000ULL;
}  // namespace

Verdict MailboxCore::check_recv(const RecvRequest& request) {
  if (Verdict bad = standing()) return bad;
  if (!open_) return Verdict::of(Fault::no_pass);
  uint64_t key = make_stamp(epoch_, step_, request.microbatch + 1);
  if (request.microbatch >= microbatches_) {
    Verdict bad = Verdict::of(Fault::bad_microbatch, make_stamp(epoch_, step_, microbatches_));
    bad.seen = request.microbatch;
    return bad;
  }
  if (received_[request.microbatch] != Received::no) return Verdict::of(Fault::received_twice, key);
  if (!port_->on_host() && port_->capturing(request.stream))
    return Verdict::of(Fault::capturing, key);
  if (leases_.size() >= port_->release_words()) return Verdict::of(Fault::held, key);
  return {};
}

bool MailboxCore::poisoned(size_t slot) const {
  for (const auto& [id, record] : leases_)
    if (record.slot == slot && (record.doomed || record.poisoned)) return true;
  for (const auto& lane : lanes_)
    for (size_t cell = 0; cell < lane.cells.size(); ++cell)
      if ((lane.block.stamp(slot, cell).load(std::memory_order_acquire) & kPoison) != 0)
        return true;
  return false;
}

// Landed, and announced: where a put is only enqueued the announce follows it, and the GPU may be
// faster than the thread that announces.
bool MailboxCore::all_arrived(uint64_t key, size_t slot) const {
  for (const auto& lane : lanes_)
    for (size_t cell = 0; cell < lane.cells.size(); ++cell)
      if (lane.block.announce(slot, cell).key.load(std::memory_order_acquire) != key) return false;
  return all_landed(key, slot);
}

bool MailboxCore::all_landed(uint64_t key, size_t slot) const {
  for (const auto& lane : lanes_)
    for (size_t cell = 0; cell < lane.cells.size(); ++cell)
      if (!reached(lane.block.stamp(slot, cell).load(std::memory_order_acquire), key)) return false;
  return true;
}

// Turns "still waiting" into the verdict of a deadline.
Verdict MailboxCore::late(Verdict want, const Patience& patience) {
  want.waited = patience.waited_s();
  want.limit = patience.limit_s();
  if (want.fault == Fault::held) {
    want.fault = Fault::credit_timeout;
    return want;
  }
  const Lane& lane = lanes_[static_cast<size_t>(want.lane)];
  uint64_t beat = lane.block.producer().heartbeat.value.load(std::memory_order_acquire);
  want.silent = beat == 0 ? -1 : static_cast<double>(now_ns() - beat) / 1e9;
  want.fault = !lane.ever           ? Fault::never_attached
               : want.expected != 0 ? Fault::stamp_timeout
                                    : Fault::announce_timeout;
  want.expected = want.key;
  return want;
}

// `before`: our own bell's count when the wait for credit was found necessary, under the lock.
void MailboxCore::sleep_for(std::unique_lock<std::mutex>& lock, const Verdict& want,
                            uint32_t before, uint64_t limit_ns, uint64_t& nap_ns) {
  uint64_t span = std::min(kTick, limit_ns);
  if (want.fault == Fault::held) {  // credit is given under our lock, then the bell is rung
    lock.unlock();
    sleep_on(
        credit_bell_, span,
        [&] { return credit_bell_.count.load(std::memory_order_seq_cst) != before; }, kAwake);
    lock.lock();
    return;
  }
  const Lane& lane = lanes_[static_cast<size_t>(want.lane)];
  const ControlBlock& block = lane.block;
  auto slot = static_cast<size_t>(want.slot), cell = static_cast<size_t>(want.cell);
  bool announced = want.expected != 0;
  bool silent = !lane.rings() || (announced && !port_->on_host());  // a GPU, a NIC ring no bell
  auto there = [&] {
    if (announced)
      return reached(block.stamp(slot, cell).load(std::memory_order_seq_cst), want.key);
    return block.announce(slot, cell).key.load(std::memory_order_seq_cst) == want.key;
  };
  lock.unlock();
  if (!silent) {
    sleep_on(block.producer().bell, span, there, kAwake);
  } else if (nap_ns > kNap || !met_awake(std::min(kAwake, limit_ns), there)) {
    sleep_ns(std::min(nap_ns, limit_ns));
    nap_ns = std::min(nap_ns * 2, kLongestNap);
  }
  lock.lock();
}

// Waits on the host until credit, announces and, for a host wait, stamps are there.
Verdict MailboxCore::host_wait(std::unique_lock<std::mutex>& lock, const RecvRequest& request,
                               uint64_t key, double& waited_s) {
  Patience patience(request.timeout_s);
  uint64_t nap = kNap;
  bool stamps = request.mode != WaitMode::stream || port_->on_host();
  uint64_t pass_then = pass();
  Interrupt interrupt(request.interrupted);
  while (true) {
    patience.tick();
    bool over = patience.over();  // judged on what is looked at from here on, not on older news
    if (Verdict aborted = given_up(key)) return aborted;
    Verdict want;
    uint32_t before = credit_bell_.count.load(std::memory_order_seq_cst);
    if (granted_ <= request.microbatch) {
      // A stream wait made now would stand before the release that it needs: a certain deadlock
      // unless that one is queued already.
      std::vector<Holder> hard = blockers(request.microbatch, true);
      bool ahead = request.mode == WaitMode::stream && hard.empty() && !request.need_announces &&
                   !port_->on_host() && !poisoned(request.microbatch % depth_);
      if (!ahead) {
        want = Verdict::of(Fault::held, key);
        want.slot = static_cast<int>(request.microbatch % depth_);
        want.holders = hard;
        if (request.mode == WaitMode::stream && !hard.empty()) return want;
      }
    }
    // Credit first: without it no lane can have brought the key, but a lane's fault is worth more
    // than a wait.
    if (!want) want = unmet(request, key, stamps);
    waited_s = patience.waited_s();
    if (!want || (want.fault != Fault::would_block && want.fault != Fault::held)) return want;
    if (request.mode == WaitMode::attempt) return Verdict::of(Fault::would_block, key);
    if (over) return late(want, patience);
    sleep_for(lock, want, before, patience.left_ns(), nap);
    lock.unlock();
    bool interrupted = interrupt.happened();
    lock.lock();
    if (interrupted) return Verdict::of(Fault::interrupted, key);
    if (Verdict bad = standing()) return bad;
    if (!open_ || pass() != pass_then || received_[request.microbatch] != Received::no)
      return Verdict::of(Fault::aborted_here, key);
  }
}

// What a pass that was closed before this one still lacks, though its leases were given: recv named
// their rows.
Verdict MailboxCore::older_unmet() {
  for (const auto& [id, record] : leases_) {
    if (!record.waiting || record.pass == pass()) continue;
    RecvRequest request;
    request.microbatch = record.microbatch;
    if (Verdict want = unmet(request, record.key, true)) return want;
  }
  return {};
}

// A recv with its rows named may run ahead of credit. The pass stays open until all of it is
// granted: the credit word is the next pass's afterwards. And until all of the passes before it has
// landed: the word that lets a closed pass keep its credit is this one's afterwards.
Verdict MailboxCore::wait_granted(std::unique_lock<std::mutex>& lock, double timeout_s,
                                  const Interrupt::Ask& interrupted) {
  Patience patience(timeout_s);
  Interrupt interrupt(interrupted);
  while (true) {
    patience.tick();
    bool over = patience.over();
    uint32_t before = credit_bell_.count.load(std::memory_order_seq_cst);
    if (Verdict bad = standing()) return bad;
    if (!open_) return Verdict::of(Fault::aborted_here);
    Verdict older = older_unmet();
    if (granted_ == microbatches_ && !older) return {};
    if (over && older) return older.fault == Fault::would_block ? late(older, patience) : older;
    if (over) {
      Verdict bad = Verdict::of(Fault::credit_timeout, make_stamp(epoch_, step_, granted_ + 1));
      bad.holders = blockers(granted_, true);
      bad.waited = patience.waited_s();
      bad.limit = timeout_s;
      return bad;
    }
    lock.unlock();
    sleep_on(credit_bell_, 20000000ULL,
             [&] { return credit_bell_.count.load(std::memory_order_seq_cst) != before; });
    bool stop = interrupt.happened();
    lock.lock();
    if (stop) return Verdict::of(Fault::interrupted);
  }
}

void MailboxCore::count_landed(uint64_t key, size_t slot, double waited_s) {
  for (auto& lane : lanes_) {
    lane.counters.wait_s += waited_s;
    for (size_t cell = 0; cell < lane.cells.size(); ++cell) {
      const auto& announce = lane.block.announce(slot, cell);
      if (announce.key.load(std::memory_order_acquire) != key) continue;
      bool dropped = (announce.flags & kDropped) != 0;
      ++lane.counters.messages;
      lane.counters.dropped += dropped ? 1 : 0;
      lane.counters.bytes += dropped ? 0
                                     : std::min(announce.rows, lane.cells[cell].row_limit) *
                                           lane.cells[cell].row_bytes;
    }
  }
}

uint64_t MailboxCore::grant_lease(const RecvRequest& request, uint64_t key, double waited_s) {
  LeaseRecord record;
  record.pass = pass();
  record.microbatch = request.microbatch;
  record.key = key;
  record.slot = request.microbatch % depth_;
  record.rows = request.rows;
  record.streams.push_back(request.stream);
  if (!all_landed(key,
                  record.slot)) {  // only a stream wait on a GPU comes here without every stamp
    for (size_t i = 0; i < lanes_.size(); ++i)
      for (size_t cell = 0; cell < lanes_[i].cells.size(); ++cell) {
        const auto& stamp = lanes_[i].block.stamp(record.slot, cell);
        if (!reached(stamp.load(std::memory_order_acquire), key))
          port_->wait(request.stream, i, stamp, key);
      }
    record.waiting = true;
    record.patience = Patience(request.timeout_s);
  } else {
    count_landed(key, record.slot, waited_s);
  }
  record.word = take_word();
  for (auto& lane : lanes_)
    tapchannel::record(lane.block.consumer_ring(), record.waiting ? Step::wait : Step::read, key, 0,
                       0);
  received_[request.microbatch] = Received::leased;
  uint64_t id = next_lease_++;
  bool waiting = record.waiting;
  leases_.emplace(id, std::move(record));
  if (waiting) ring(bell_);
  return id;
}

std::pair<Verdict, uint64_t> MailboxCore::recv(const RecvRequest& request) {
  if (fork_.forked()) return {Verdict::of(Fault::forked), 0};
  std::unique_lock lock(mutex_);
  if (Verdict bad = check_recv(request)) return {bad, 0};
  uint64_t key = make_stamp(epoch_, step_, request.microbatch + 1);
  double waited_s = 0;
  size_t slot = request.microbatch % depth_;
  Verdict verdict = host_wait(lock, request, key, waited_s);
  if (!verdict && all_arrived(key, slot)) verdict = rows_fault(key, slot, request.rows);
  switch (verdict.fault) {
    case Fault::none:
      return {Verdict{}, grant_lease(request, key, waited_s)};
    case Fault::would_block:
    case Fault::interrupted:
    case Fault::held:
    case Fault::closed:
    case Fault::aborted_here:
      return {verdict, 0};
    default:  // one verdict a key, the same for every later call until abort or reset
      if (!failure_) failure_ = verdict;
      return {verdict, 0};
  }
}

Verdict MailboxCore::settle(uint64_t lease, double timeout_s, const Interrupt::Ask& interrupted) {
  if (fork_.forked()) return Verdict::of(Fault::forked);
  std::unique_lock lock(mutex_);
  Patience patience(timeout_s);
  Interrupt interrupt(interrupted);
  while (true) {
    auto found = leases_.find(lease);
    if (found == leases_.end()) return {};
    if (found->second.failure) return found->second.failure;
    if (!found->second.waiting || all_arrived(found->second.key, found->second.slot)) return {};
    patience.tick();
    if (patience.over()) return Verdict::of(Fault::would_block, found->second.key);
    lock.unlock();
    sleep_ns(kLongestNap);
    bool stop = interrupt.happened();
    lock.lock();
    if (stop) return Verdict::of(Fault::interrupted);
  }
}

}  // namespace tapchannel
