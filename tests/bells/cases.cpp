// What a sleeper on a bell must not sleep through, one case a run: bells CASE
#include "cases.hpp"

#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

#include "bells.hpp"

namespace bells {
namespace {

using namespace tapchannel;

constexpr uint64_t kLong = 10000000000ULL;  // 10 s: who sleeps as long as that was not woken
constexpr int kNotHere = 77;

void must(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::_Exit(1);  // no destructors: a thread may still sleep
}

// A thread that sleeps, and whoever watches it.
class Sleeper {
 public:
  template <class Sleep>
  explicit Sleeper(Sleep sleep)
      : thread_([this, sleep] {
          id_ = static_cast<long>(syscall(SYS_gettid));
          sleep(*this);
          back_.store(true);
        }) {}
  // The thread's own, with nothing but the sleep before it.
  void falls_asleep() {
    rusage usage{};
    getrusage(RUSAGE_THREAD, &usage);
    sleeps_.store(usage.ru_nvcsw);
  }
  // Waits until it has given up its core, which it does to sleep only: a yield counts elsewhere.
  void await_asleep() const {
    for (Patience patience(10); !asleep(); sleep_ns(100000)) {
      patience.tick();
      must(!back_.load() && !patience.over(), "it falls asleep");
    }
  }
  void join() { thread_.join(); }

 private:
  bool asleep() const {
    if (sleeps_.load() < 0) return false;
    std::ifstream status("/proc/self/task/" + std::to_string(id_.load()) + "/status");
    const std::string name = "voluntary_ctxt_switches:";
    for (std::string line; std::getline(status, line);)
      if (line.compare(0, name.size(), name) == 0)
        return std::stol(line.substr(name.size())) > sleeps_.load();
    return false;
  }
  std::atomic<long> id_{0}, sleeps_{-1};
  std::atomic<bool> back_{false};
  std::thread thread_;
};

template <class Sleep>
bool is_woken(Sleep&& sleep) {
  uint64_t began = now_ns();
  sleep();
  return now_ns() - began < kLong;
}

// It came between the caller's look and the sleeper's announcing itself: nobody was to be woken.
void what_came_before_is_not_slept_on() {
  Bell bell{};
  std::atomic<bool> here{true};
  ring(bell);
  must(is_woken([&] { sleep_on(bell, kLong, [&] { return here.load(); }); }), "it is awake");
  auto late = [&] { return bell.sleepers.load() != 0; };  // not while it is awake
  must(is_woken([&] { sleep_on(bell, kLong, late, kAwake); }), "it is awake after its awake time");
  must(bell.sleepers.load() == 0, "nobody sleeps");
}

// It comes between the last look and the sleep: the bell's count is no longer the one seen.
void what_comes_after_the_look_is_not_slept_on() {
  Bell bell{};
  auto rung_behind_it = [&] {
    ring(bell);
    return false;
  };
  must(is_woken([&] { sleep_on(bell, kLong, rung_behind_it); }), "it is awake");
}

void a_ring_wakes_who_sleeps() {
  Bell bell{};
  Sleeper sleeper([&](Sleeper& self) {
    auto last_look = [&] {
      self.falls_asleep();
      return false;
    };
    must(is_woken([&] { sleep_on(bell, kLong, last_look); }), "the ring has woken it");
  });
  sleeper.await_asleep();
  ring(bell);
  sleeper.join();
  must(bell.sleepers.load() == 0, "nobody sleeps");
}

// So that the ring needs no system call.
void what_comes_soon_is_met_awake() {
  Bell bell{};
  int looks = 0;
  bool announced = false;
  auto third = [&] {
    announced = announced || bell.sleepers.load() != 0;
    return ++looks == 3;
  };
  must(is_woken([&] { sleep_on(bell, kLong, third, kLong); }), "it is awake");
  must(looks == 3, "it looked until it was there");
  must(!announced, "it did not announce itself");
}

void awake_time_ends() {
  Bell bell{};
  must(is_woken([&] { sleep_on(bell, 1000000, [] { return false; }, kLong); }), "with its wait");
  must(!met_awake(1000000, [] { return false; }), "it was not met");
}

void several_bells_miss_no_ring() {
  Bell bell[2]{};
  Bells bells;
  bool can = true;
  for (Bell& each : bell) bells.add(each);
  ring(bell[1]);
  must(is_woken([&] { can = bells.sleep(kLong); }), "what rang since it was added has woken it");
  if (!can) std::exit(kNotHere);
  for (Bell& each : bell) must(each.sleepers.load() == 0, "nobody sleeps");
}

void any_of_several_bells_wakes() {
  Bell bell[2]{};
  Sleeper sleeper([&](Sleeper& self) {
    Bells bells;
    bool can = true;
    for (Bell& each : bell) bells.add(each);
    self.falls_asleep();
    must(is_woken([&] { can = bells.sleep(kLong); }), "the ring has woken it");
    if (!can) std::_Exit(kNotHere);
  });
  sleeper.await_asleep();
  ring(bell[1]);
  sleeper.join();
}

const cases::Cases kCases{
    {"what_came_before_is_not_slept_on", what_came_before_is_not_slept_on},
    {"what_comes_after_the_look_is_not_slept_on", what_comes_after_the_look_is_not_slept_on},
    {"a_ring_wakes_who_sleeps", a_ring_wakes_who_sleeps},
    {"what_comes_soon_is_met_awake", what_comes_soon_is_met_awake},
    {"awake_time_ends", awake_time_ends},
    {"several_bells_miss_no_ring", several_bells_miss_no_ring},
    {"any_of_several_bells_wakes", any_of_several_bells_wakes},
};

}  // namespace
}  // namespace bells

int main(int argc, char** argv) { return cases::run(bells::kCases, argc, argv); }
