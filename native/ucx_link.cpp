#include "ucx_link.hpp"

namespace tapchannel::ucx {

namespace {
constexpr uint64_t kBeat = 1000000000ULL;  // between heartbeats, each of which must be taken
constexpr size_t kMostPending = 1024;      // operations under way before a push waits for some
constexpr uint64_t kSettleNap = 100000;
}  // namespace

// A word of this side, and what the peer has of it. Words of a lower tier are performed at the peer
// before those of a higher are put: the order in which this side stored them.
struct Link::Carried {
  const std::atomic<uint64_t>* word;
  int tier;
  bool explained;  // stands behind the reason's text
  uint64_t sent = 0, sending = 0;
};

struct Link::Message {
  uint64_t key;
  Announce said;
};

Link::Link(std::shared_ptr<Context> context, Side side, std::shared_ptr<Memory> own, double limit_s)
    : Endpoint(std::move(context), limit_s), side_(side), own_(std::move(own)) {
  start();
}

Link::~Link() {
  if (fork_.forked())
    new std::shared_ptr<Memory>(std::move(own_));  // the parent's registration
  else
    end();
}

void Link::end() noexcept {
  Endpoint::end();
  if (!fork_.forked()) own_.reset();
}

void Link::name_words() {
  auto add = [this](const Word& word, int tier, bool explained = false) {
    words_.push_back({&word.value, tier, explained});
  };
  if (side_ == Side::consumer) {
    const auto& mine = block_->consumer();
    // completed before open_pass and credit: those two are the next pass's when they change.
    for (const Word* word : {&mine.epoch, &mine.completed, &mine.state}) add(*word, 1);
    add(mine.aborted, 1, true);
    add(mine.credit, 2);
    add(mine.open_pass, 2);
    return;
  }
  const auto& mine = block_->producer();
  add(mine.open_pass, 1);
  for (const Word& word : mine.aborted) add(word, 1, true);
  add(mine.state, 2);
}

void Link::begin(ControlBlock& block, int socket) {
  {
    std::lock_guard lock(mutex_);
    block_ = &block;
    live_.store(true, std::memory_order_release);
    name_words();
    adopt_socket(socket);
    if (!usable()) shutdown(socket, SHUT_RDWR);
  }
  kick();
}

void Link::look() {
  if (block_ == nullptr) return;
  note_peer();
  carry();
  beat();
}

// What came may be what a thread of this side sleeps for.
void Link::arrived() {
  if (!live_.load(std::memory_order_acquire)) return;
  ring(side_ == Side::consumer ? block_->producer().bell : block_->consumer().bell);
}

// The peer's clock is another: its heartbeat is dated here, when it is seen to change.
void Link::note_peer() {
  Word& beat = side_ == Side::consumer ? block_->producer().beat : block_->consumer().beat;
  uint64_t seen = beat.value.load(std::memory_order_acquire);
  if (seen == seen_beat_) return;
  seen_beat_ = seen;
  Word& dated =
      side_ == Side::consumer ? block_->producer().heartbeat : block_->consumer().heartbeat;
  dated.value.store(now_ns(), std::memory_order_release);
}

// One round: the changed words of the lowest tier, then a flush. The next round follows when that
// has ended, and takes what has changed meanwhile with it.
void Link::carry() {
  if (carrying_) return;
  int lowest = INT32_MAX;
  uint64_t aborts = 0;  // tells one set of aborted words from another
  for (Carried& carried : words_) {
    carried.sending = carried.word->load(std::memory_order_acquire);
    if (carried.sending == carried.sent) continue;
    if (carried.explained) aborts = aborts * 31 + carried.sending;
    lowest = std::min(lowest, carried.tier);
  }
  if (lowest == INT32_MAX) return;
  if (aborts != 0 && aborts != explained_) return carry_reason(aborts);
  std::vector<Carried*> round;
  for (Carried& carried : words_)
    if (carried.tier == lowest && carried.sending != carried.sent) round.push_back(&carried);
  carrying_ = true;
  for (Carried* carried : round)
    put(&carried->sending, sizeof(uint64_t), Target::block, block_->offset_of(carried->word),
        nullptr);
  flush([this, round] {
    for (Carried* carried : round) carried->sent = carried->sending;
    carrying_ = false;
    carry();
  });
}

// Why a pass was aborted goes ahead of the word that says so.
void Link::carry_reason(uint64_t aborts) {
  const Text& text =
      side_ == Side::consumer ? block_->consumer().reason : block_->producer().reason;
  auto copy = std::make_shared<Text>();
  write_text(*copy, read_text(text));  // the side's next abort may be writing it
  carrying_ = true;
  put(copy.get(), sizeof(Text), Target::block, block_->offset_of(&text), copy);
  flush([this, aborts] {
    explained_ = aborts;
    carrying_ = false;
    carry();
  });
}

// Taken by the peer's network or it is cut: the flush has a deadline.
void Link::beat() {
  uint64_t at = now_ns();
  if (at - beaten_at_ < kBeat || pending() != 0) return;
  beaten_at_ = at;
  const Word& word = side_ == Side::consumer ? block_->consumer().beat : block_->producer().beat;
  auto count = std::make_shared<uint64_t>(++beats_);
  put(count.get(), sizeof(uint64_t), Target::block, block_->offset_of(&word), count);
  flush([] {});
}

void Link::wait_for_room(std::unique_lock<std::mutex>& lock) {
  while (usable() && pending() >= kMostPending) {
    lock.unlock();
    kick();
    sleep_ns(kSettleNap);
    lock.lock();
  }
}

void Link::put_rows(const Source& source, const Place& to, const CellGeometry& cell,
                    const std::shared_ptr<void>& keep) {
  std::unique_lock lock(mutex_);
  bool flat = source.rows == 1 || (source.pitch == cell.row_bytes && cell.pitch == cell.row_bytes);
  if (flat) return put(source.data, source.rows * cell.row_bytes, Target::arena, to.offset, keep);
  for (size_t row = 0; row < source.rows && usable(); ++row) {
    wait_for_room(lock);
    put(source.data + row * source.pitch, cell.row_bytes, Target::arena,
        to.offset + row * cell.pitch, keep);
  }
}

uint64_t Link::stamp(const Mark& mark) {
  uint64_t number = 0;
  {
    std::lock_guard lock(mutex_);
    carry();  // the pass that the key is of is known at the consumer before its stamp
    auto message = std::make_shared<Message>();
    message->key = mark.key;
    std::memcpy(static_cast<void*>(&message->said), &mark.announce, sizeof(Announce));
    size_t stamp_at = block_->offset_of(&mark.stamp), said_at = block_->offset_of(&mark.announce);
    Target home = Target::block;
    if (has(Target::words)) {  // laid out as the stamps are; the consumer's gate stamps
      home = Target::words;
      stamp_at -= block_->offset_of(&block_->stamp(0, 0));
    }
    constexpr size_t kKeyBytes = sizeof(uint64_t);  // the announce's first word, put last
    put(reinterpret_cast<const uint8_t*>(&message->said) + kKeyBytes, sizeof(Announce) - kKeyBytes,
        Target::block, said_at + kKeyBytes, message);
    number = ++stamped_;
    flush([this, message, home, stamp_at, said_at] {
      put(&message->key, kKeyBytes, Target::block, said_at, message);
      put(&message->key, kKeyBytes, home, stamp_at, message);
      performed_.fetch_add(1, std::memory_order_release);
    });
  }
  kick();
  return number;
}

void Link::await(uint64_t number) {
  while (performed() < number && failure().empty()) sleep_ns(kSettleNap);
}

bool Link::clean() const {
  if (carrying_ || performed() != stamped_) return false;
  return std::all_of(words_.begin(), words_.end(), [](const Carried& carried) {
    return carried.word->load(std::memory_order_acquire) == carried.sent;
  });
}

bool Link::settle(uint64_t limit_ns) {
  auto done = std::make_shared<std::atomic<bool>>(false);
  bool asked = false;
  Patience patience(static_cast<double>(limit_ns) / 1e9);
  kick();
  while (!patience.over()) {
    {
      std::lock_guard lock(mutex_);
      if (!usable()) return false;
      if (!asked && clean()) {
        asked = true;
        flush([done] { done->store(true, std::memory_order_release); });
      }
    }
    if (done->load(std::memory_order_acquire)) return true;
    kick();
    sleep_ns(kSettleNap);
    patience.tick();
  }
  return false;
}

}  // namespace tapchannel::ucx
