// A wire with faults on order, for tests: what it is told to befalls the next messages of a lane.
//
// It keeps the order of the calls, as the contract of transport.hpp demands, so a message behind
// one that is held is held as well. A mishap that breaks the contract on purpose is `overtake`.
#pragma once

#include <deque>
#include <functional>
#include <mutex>

#include "transport.hpp"

namespace tapchannel {

enum class Mishap : int {
  none,
  delay,      // the put begins so many seconds late
  hold,       // half of the payload arrives; the rest, and the stamp, once let_go() is called
  drop,       // neither payload nor stamp arrives; the wire takes it for performed
  duplicate,  // payload and stamp arrive twice
  tear,       // half of the payload arrives, then the wire fails
  overtake,   // the stamp arrives over half of the payload, whose rest never comes
};

// What a test holds of such a wire. All calls may come from any thread.
class Faults {
 public:
  void next(Mishap mishap, double seconds);
  // Puts and stamps what was held, in order. Nothing any more once the outbox has closed.
  void let_go();
  size_t held();  // calls that wait for let_go()

 private:
  friend class FaultyTransport;
  std::mutex mutex_;
  std::deque<std::pair<Mishap, double>> script_;
  std::deque<std::function<void()>> held_;
};

class FaultyTransport final : public Transport {
 public:
  FaultyTransport(std::unique_ptr<Transport> inner, std::shared_ptr<Faults> faults)
      : inner_(std::move(inner)), faults_(std::move(faults)) {}
  ~FaultyTransport() override { abandon(); }
  Token order(uintptr_t stream) override { return inner_->order(stream); }
  void forget(Token token) override { inner_->forget(token); }
  void put(Token token, const Source& source, const Place& to, const CellGeometry& cell) override;
  void put_poison(const Place& to, size_t rows, const CellGeometry& cell) override;
  void stamp(const Mark& mark, const Place& at) override;
  void mark() override { inner_->mark(); }
  uint64_t performed() const override;
  bool finish(uint64_t limit_ns) override { return !abandon() && inner_->finish(limit_ns); }
  void enter_thread() override { inner_->enter_thread(); }
  // What is held still reads its source; so the lane's own thread puts, and sources stay alive.
  bool immediate() const override { return false; }
  bool in_call() const override { return false; }
  bool announces_ahead() const override { return inner_->announces_ahead(); }
  void begin(ControlBlock& block, int socket) override { inner_->begin(block, socket); }
  void kick() override { inner_->kick(); }
  void cancel() override {
    cancelled_.store(true, std::memory_order_release);
    inner_->cancel();
  }
  bool settle(uint64_t limit_ns) override { return inner_->settle(limit_ns); }
  bool rings() const override { return inner_->rings(); }
  std::string failure() const override { return inner_->failure(); }

 private:
  void begin_message();
  void pause(double seconds) const;
  bool abandon();
  void do_or_hold(std::function<void()> call);

  std::unique_ptr<Transport> inner_;
  std::shared_ptr<Faults> faults_;
  std::atomic<bool> cancelled_{false};
  uint64_t stamped_ = 0;              // at the inner transport, held ones included
  mutable std::deque<uint64_t> due_;  // of each message: how many stamps it is performed after
  mutable uint64_t performed_ = 0;
  Mishap mishap_ = Mishap::none;  // of the message under way; with the lock held
  std::function<void()> again_;   // its put once more
};

}  // namespace tapchannel
