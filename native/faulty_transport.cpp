#include "faulty_transport.hpp"

#include "block.hpp"

namespace tapchannel {

namespace {
constexpr uint64_t kNap = 1000000;  // 1 ms

Source rows_of(const Source& source, size_t first, size_t end) {
  return {source.data + first * source.pitch, end - first, source.pitch};
}

Place behind(const Place& to, size_t rows, const CellGeometry& cell) {
  return {to.offset + rows * cell.pitch, to.track, to.cell};
}
}  // namespace

void Faults::next(Mishap mishap, double seconds) {
  std::lock_guard lock(mutex_);
  script_.emplace_back(mishap, seconds);
}

void Faults::let_go() {
  std::lock_guard lock(mutex_);  // what is put meanwhile waits, and stays behind what was held
  while (!held_.empty()) {
    auto call = std::move(held_.front());
    held_.pop_front();
    call();
  }
}

size_t Faults::held() {
  std::lock_guard lock(mutex_);
  return held_.size();
}

// The outbox closes with calls still held: their sources go, so they must not be made any more.
bool FaultyTransport::abandon() {
  std::lock_guard lock(faults_->mutex_);
  bool any = !faults_->held_.empty();
  faults_->held_.clear();
  return any;
}

void FaultyTransport::pause(double seconds) const {
  uint64_t end = now_ns() + static_cast<uint64_t>(seconds * 1e9);
  while (now_ns() < end && !cancelled_.load(std::memory_order_acquire)) sleep_ns(kNap);
}

void FaultyTransport::begin_message() {
  double seconds = 0;
  {
    std::lock_guard lock(faults_->mutex_);
    mishap_ = Mishap::none;
    if (!faults_->script_.empty()) {
      std::tie(mishap_, seconds) = faults_->script_.front();
      faults_->script_.pop_front();
    }
  }
  if (mishap_ == Mishap::delay) pause(seconds);
}

void FaultyTransport::do_or_hold(std::function<void()> call) {
  if (faults_->held_.empty())
    call();
  else
    faults_->held_.push_back(std::move(call));
}

void FaultyTransport::put(Token token, const Source& source, const Place& to,
                          const CellGeometry& cell) {
  begin_message();
  std::lock_guard lock(faults_->mutex_);
  size_t half = source.rows / 2;
  bool halved = mishap_ == Mishap::hold || mishap_ == Mishap::tear || mishap_ == Mishap::overtake;
  auto whole = [this, token, source, to, cell] { inner_->put(token, source, to, cell); };
  if (mishap_ == Mishap::drop) {
    if (token != nullptr) inner_->forget(token);
    return;
  }
  if (mishap_ == Mishap::duplicate)
    again_ = [this, source, to, cell] { inner_->put(nullptr, source, to, cell); };
  if (!halved || !faults_->held_.empty()) return do_or_hold(whole);
  inner_->put(token, rows_of(source, 0, half), to, cell);
  if (mishap_ == Mishap::tear)
    throw std::runtime_error("fault on order: the wire tore in mid-payload");
  if (mishap_ == Mishap::hold)
    faults_->held_.emplace_back([this, source, to, cell, half] {
      inner_->put(nullptr, rows_of(source, half, source.rows), behind(to, half, cell), cell);
    });
}

void FaultyTransport::put_poison(const Place& to, size_t rows, const CellGeometry& cell) {
  mishap_ = Mishap::none;
  std::lock_guard lock(faults_->mutex_);
  do_or_hold([this, to, rows, cell] { inner_->put_poison(to, rows, cell); });
}

void FaultyTransport::stamp(const Mark& mark, const Place& at) {
  std::lock_guard lock(faults_->mutex_);
  Mishap mishap = std::exchange(mishap_, Mishap::none);
  stamped_ += mishap == Mishap::drop ? 0 : mishap == Mishap::duplicate ? 2 : 1;
  due_.push_back(stamped_);
  if (mishap == Mishap::drop) return;
  auto once = [this, mark, at] { inner_->stamp(mark, at); };
  do_or_hold(once);
  if (mishap != Mishap::duplicate) return;
  do_or_hold(std::exchange(again_, nullptr));
  do_or_hold(once);
}

uint64_t FaultyTransport::performed() const {
  std::lock_guard lock(faults_->mutex_);
  uint64_t stamped = inner_->performed();
  while (!due_.empty() && due_.front() <= stamped) {
    due_.pop_front();
    ++performed_;
  }
  return performed_;
}

}  // namespace tapchannel
