#include "gate.hpp"

#include <exception>

namespace tapchannel {

namespace {
constexpr uint64_t kTick = 20000000ULL;      // 20 ms: while bells tell of all that may come
constexpr uint64_t kNap = 10000ULL;          // first nap between looks at words that a GPU writes
constexpr uint64_t kLongestNap = 100000ULL;  // and the last one
constexpr uint64_t kDeafNap = 500000ULL;     // where no bells can be slept on
}  // namespace

Gate::Gate(std::unique_ptr<Passage> passage, const std::vector<Served>& lanes, uint64_t slot_bytes)
    : passage_(std::move(passage)), slot_bytes_(slot_bytes) {
  for (const Served& served : lanes) {
    auto lane = std::make_unique<Lane>();
    lane->of = served;
    lane->passed =
        std::make_unique<std::atomic<uint64_t>[]>(served.block->depth() * served.block->cells());
    lanes_.push_back(std::move(lane));
  }
  thread_ = std::thread([this] { run(); });
}

Gate::~Gate() { close(); }

void Gate::close() {
  stop_.store(true, std::memory_order_release);
  ring(bell_);
  if (thread_.joinable()) thread_.join();
  passage_.reset();  // waits for its copies
}

Mapping& Gate::arrivals(size_t index, const std::string& name) {
  Lane& lane = *lanes_.at(index);
  if (!lane.arrivals) {
    size_t bytes = arrival_bytes(lane.of.block->depth(), lane.of.block->cells());
    lane.arrivals = std::make_shared<Mapping>(Mapping::create(name, bytes));
  }
  return *lane.arrivals;
}

void Gate::begin(size_t index) {
  Lane& lane = *lanes_.at(index);
  if (!lane.arrivals) throw std::invalid_argument("the lane has no arrival words");
  for (size_t i = 0; i < lane.of.block->depth() * lane.of.block->cells(); ++i)
    arrival(*lane.arrivals, i).store(0, std::memory_order_release);
  lane.served.store(true, std::memory_order_release);
  ring(bell_);
}

bool Gate::fence(size_t index) {
  Lane& lane = *lanes_.at(index);
  if (!lane.served.load(std::memory_order_acquire)) return true;
  std::unique_lock lock(looking_, std::try_to_lock);
  if (!lock) return false;
  bool clear = passage_->performed() >= lane.last;
  if (!clear) {
    mark_wanted_.store(true, std::memory_order_release);
    ring(bell_);
  }
  each_due(lane, [&](size_t slot, size_t cell, uint64_t key) {
    clear = clear && !arrived(lane, slot, cell, key);
  });
  if (clear) lane.served.store(false, std::memory_order_release);
  return clear;
}

void Gate::credit(uint64_t granted) {
  granted_.store(granted, std::memory_order_release);
  ring(bell_);
}

bool Gate::passed(size_t lane, size_t slot, size_t cell, uint64_t key) const {
  const Lane& of = *lanes_[lane];
  return of.passed[index(of, slot, cell)].load(std::memory_order_acquire) == key;
}

bool Gate::underway(size_t lane, size_t slot, size_t cell, uint64_t key) const {
  return passed(lane, slot, cell, key) || arrived(*lanes_[lane], slot, cell, key);
}

std::string Gate::failure() {
  return failed_.load(std::memory_order_acquire) ? failure_ : std::string();
}

// The announce too: a payload of which its lane never said what it is cannot be used.
bool Gate::arrived(const Lane& lane, size_t slot, size_t cell, uint64_t key) const {
  return arrival_of(lane, slot, cell).load(std::memory_order_acquire) == key &&
         announced(lane, slot, cell, key);
}

bool Gate::announced(const Lane& lane, size_t slot, size_t cell, uint64_t key) const {
  return lane.of.block->announce(slot, cell).key.load(std::memory_order_acquire) == key;
}

// The keys that have credit and have not been let through yet. A slot's newest granted key is the
// only one that may be written to it.
template <class Look>
void Gate::each_due(Lane& lane, Look&& look) const {
  uint64_t granted = granted_.load(std::memory_order_acquire);
  size_t depth = lane.of.block->depth(), cells = lane.of.block->cells();
  uint64_t count = count_of(granted);
  for (uint64_t left = std::min<uint64_t>(count, depth); left > 0; --left) {
    uint64_t key = granted - left + 1;
    size_t slot = (count_of(key) - 1) % depth;
    for (size_t cell = 0; cell < cells; ++cell)
      if (lane.passed[index(lane, slot, cell)].load(std::memory_order_acquire) != key)
        look(slot, cell, key);
  }
}

Gate::Awaited Gate::look() {
  std::lock_guard lock(looking_);
  bells_.clear();
  bells_.add(bell_);  // before whatever is looked at: what changes later rings it anew
  if (mark_wanted_.exchange(false, std::memory_order_acq_rel)) passage_->mark();
  Awaited awaited = Awaited::nothing;
  for (size_t i = 0; i < lanes_.size(); ++i) {
    Lane& lane = *lanes_[i];
    if (!lane.served.load(std::memory_order_acquire)) continue;
    bells_.add(lane.of.block->producer().bell);
    each_due(lane, [&](size_t slot, size_t cell, uint64_t key) {
      if (arrived(lane, slot, cell, key) && let_through(i, slot, cell, key)) return;
      bool near = announced(lane, slot, cell, key);
      awaited = std::max(awaited, near ? Awaited::payload : Awaited::announce);
    });
  }
  return awaited;
}

// A lane rings when it has announced; a GPU that then brings the payload rings nothing.
void Gate::sleep(Awaited awaited) {
  if (stop_.load(std::memory_order_acquire)) return;
  if (awaited == Awaited::payload) {
    if (awake_until_ == 0) awake_until_ = now_ns() + kAwake;
    if (now_ns() < awake_until_) return static_cast<void>(sched_yield());
    sleep_ns(nap_ns_);
    nap_ns_ = std::min(nap_ns_ * 2, kLongestNap);
    return;
  }
  nap_ns_ = kNap;
  awake_until_ = 0;
  if (!bells_.sleep(kTick)) sleep_ns(kDeafNap);
}

// False for an announce that does not fit the plan: its numbers must not be used, and the mailbox
// tells its caller so.
bool Gate::let_through(size_t number, size_t slot, size_t cell, uint64_t key) {
  Lane& lane = *lanes_[number];
  const CellGeometry& geometry = (*lane.of.cells)[cell];
  AnnounceFacts said = read_announce(*lane.of.block, geometry, cell, slot, key);
  if (!said.present || !said.fits) return false;
  Arrival arrival;
  arrival.lane = number;
  arrival.stamp = &lane.of.block->stamp(slot, cell);
  arrival.key = key;
  arrival.offset = slot * slot_bytes_ + geometry.offset + said.row_begin * geometry.pitch;
  arrival.rows = said.rows;
  arrival.cell = &geometry;
  arrival.track = slot + cell;
  passage_->let_through(arrival);
  lane.last = ++count_;
  lane.passed[index(lane, slot, cell)].store(key, std::memory_order_release);
  record(lane.of.block->consumer_ring(), Step::put, key, cell, said.rows * geometry.row_bytes);
  ring(lane.of.block->producer().bell);  // the one that a host wait of the consumer sleeps on
  return true;
}

void Gate::run() {
  nap_ns_ = kNap;
  try {
    passage_->enter_thread();
    while (!stop_.load(std::memory_order_acquire)) {
      uint64_t before = count_;
      Awaited awaited = look();
      if (count_ != before) {
        nap_ns_ = kNap;
        awake_until_ = 0;
      }
      sleep(awaited);
    }
  } catch (const std::exception& error) {  // every wait on a staged lane now fails with these words
    failure_ = error.what();
    failed_.store(true, std::memory_order_release);
  }
}

}  // namespace tapchannel
