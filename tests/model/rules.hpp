// The protocol's rules: from a state, every step that some process may take next.
//
// A step's number is the design's (section 3): 1 grant, 2 announce, 3 claim, 5 put, 6 stamp, 7
// wait, 8 read, 9 release; 0 stands for what the nine steps leave out (passes, lives, faults).
#pragma once

#include <string>
#include <vector>

#include "state.hpp"

namespace model {

enum class Wire : uint8_t { shm, cuda_ipc, staged, ucx };
enum class Recv : uint8_t { host, stream, named };  // named: recv(rows=...), ahead of the announce

// Faults that a run may seed; each breaks one rule of the code.
#define MODEL_BUGS(X)                                                                              \
  X(none)                                                                                          \
  X(stamp_early)        /* step 6 before step 5 */                                                 \
  X(credit_early)       /* step 1 before the reads of step 8 were performed */                     \
  X(credit_over_passes) /* a pass's first credit before the last pass's reads were performed */    \
  X(epoch_ignored)      /* words of two epochs compare equal */                                    \
  X(poison_forgotten)   /* a late stamp makes a failed lease good */                               \
  X(poison_at_once)     /* a wait is poisoned while an older lease is on the slot */               \
  X(poison_once)        /* a poison that a dead pass's late stamp overwrote is not put back */     \
  X(ahead_of_poison)    /* a wait is enqueued that a poison to be put back would let through */    \
  X(poison_kept)        /* a poisoned stamp is not cleared when its slot is granted anew */        \
  X(pattern_late)       /* a slot is granted before its poison pattern was performed */            \
  X(no_fence)           /* a restarted lane is let in while the dead one's puts may land */        \
  X(no_gate_fence)      /* ... while the gate still carries the last life's */                     \
  X(restart_hides_loss) /* who waits for a lane's last life is not told once the next has begun */ \
  X(restart_joins)      /* a restarted lane takes part in the rest of the pass */                  \
  X(close_ends_credit)  /* a pass that was closed loses its credit */                              \
  X(next_ends_credit)   /* ... once a later one is closed, its own taps still awaited */           \
  X(attach_ends_credit) /* ... for a lane that attaches for the first time after that */           \
  X(announce_ahead)     /* on a GPU, step 2 before step 5 was enqueued */                          \
  X(wait_unpassed)      /* a stream waits for a tap that has not passed the gate */                \
  X(wait_for_held)      /* a stream waits for a slot whose release it stands before */             \
  X(old_memory)         /* a restarted consumer uses its last life's memory */                     \
  X(drop_at_once)       /* drop_newest writes the pattern without credit */                        \
  X(drop_unmarked)      /* drop_newest does not say so */                                          \
  X(queue_in_order)     /* a queued push holds up the later ones */                                \
  X(credit_carried_first) /* between hosts, the next pass's credit ahead of the last one's end */

enum class Bug : uint8_t {
#define MODEL_BUG(name) name,
  MODEL_BUGS(MODEL_BUG)
#undef MODEL_BUG
};

struct Config {
  Wire wire = Wire::shm;
  Recv recv = Recv::host;
  Bug bug = Bug::none;
  int lanes = 2, depth = 2, passes = 2, faults = 1, limit = 2;
  int width[3] = {3, 3, 3};  // microbatches of each pass
  bool shared = false;       // lane 0 lives in the consumer's process, with one connection
  bool drop = false;         // when_full="drop_newest"
  bool whole = false;        // a put and its stamp in one step
  bool fine = false;         // a payload in two halves, an announce apart from it
  bool any_order = false;    // producers push in any order
  bool direct = false;       // a lane that was staged comes back by cuda_ipc
};

struct Action {
  int number = 0;  // the design's
  int lane = -1;
  const char* text = "";
  Word key = 0;
  const char* broken = nullptr;  // the invariant that this step breaks
  bool fault = false;            // takes one of the run's faults
};
std::string to_text(const Action& action);

struct Successor {
  Action action;
  State state;
};

class Rules {
 public:
  explicit Rules(const Config& config) : config_(config) {}
  State first() const;
  // Where nothing but faults can happen any more and somebody still waits, what is wrong is
  // returned: no wait may need its deadline to end, whatever went wrong before.
  const char* successors(const State& from, std::vector<Successor>& to);

 private:
  // consumer.cpp
  void consumer(const State& from);
  void open(const State& from);
  void receive(const State& from, int microbatch);
  void close(const State& from);
  void disturb(const State& from);
  void store_lane_words(Consumer& mine, Lane& lane) const;
  void advance(State& state) const;
  bool blocked(const State& state, int microbatch, bool hard) const;
  void end_pass(State& state) const;
  void crash_consumer(const State& from);
  // leases.cpp
  void drop(const State& from);
  void erase(State& state, int lease) const;
  void fail(State& state, int lease) const;
  void fail_waits(State& state, int lane) const;
  bool may_poison(const State& state, int lease) const;
  void poison(State& state, Lease& lease) const;
  bool poison_words(State& state, const Lease& lease) const;
  // wait.cpp
  enum class Want : uint8_t { nothing, more, fault };
  Want unmet(const State& state, Word key, bool stamps, bool announces) const;
  bool given_up(const State& state, Word key) const;
  bool all_landed(const State& state, Word key) const;
  bool all_arrived(const State& state, Word key) const;
  const char* misread(const State& state, Word key, bool flags) const;
  const char* overwrite(State& state, int slot) const;
  const char* perform(State& state) const;
  const char* read_on(State& state) const;
  void stream(const State& from);
  void monitor(const State& from);
  // lane.cpp
  void lane(const State& from, int index);
  void push(const State& from, int index);
  void send(const State& from, int index);
  void close_pass(const State& from, int index);
  void watch_queue(const State& from, int index);
  void life(const State& from, int index);
  void attach(const State& from, int index);
  void carry(const State& from, int index);
  static void give_up(Lane& lane, int pass);
  bool covers(const Lane& lane, Word key) const;
  bool over(const Lane& lane, Word key) const;
  // puts.cpp
  enum class Whose : uint8_t { lane, ghost, gate };
  void puts(const State& from, int index, int slot, Whose whose);
  void gate(const State& from, int index);
  bool fenced(const State& state, int index) const;
  uint8_t behind(const State& state) const;

  void emit(const State& state, int number, int lane, const char* text, Word key = 0,
            const char* broken = nullptr) {
    out_->push_back({{number, lane, text, key, broken, spent_}, state});
    spent_ = false;
  }
  // Takes one of the run's faults, if there is one left.
  bool spend(State& state) {
    if (state.faults == 0) return false;
    --state.faults;
    return spent_ = true;
  }
  void all(const State& from);
  const char* unfinished(const State& state) const;
  bool bug(Bug wanted) const { return config_.bug == wanted; }
  bool on_host() const { return config_.wire == Wire::shm; }
  int slot_of(Word key) const { return (count_of(key) - 1) % config_.depth; }
  int width(int step) const { return config_.width[step - 1]; }
  bool staged(const Lane& lane) const { return config_.wire == Wire::staged && !lane.direct; }
  // As a key stands in a word.
  Word word(Word key) const {
    if (!bug(Bug::epoch_ignored) || key_of(key) == 0) return key;
    return static_cast<Word>((key & ~0x60) | 1 << 5);
  }
  Word pass(const Consumer& mine) const { return make_word(mine.epoch, mine.step, 0); }
  const ConsumerWords& heard(const Lane& lane) const {
    return config_.wire == Wire::ucx ? lane.heard : lane.words;
  }
  static uint8_t bit(int pass) {
    return static_cast<uint8_t>(1 << (((pass >> 2) - 1) * 4 + (pass & 3)));
  }

  Config config_;
  std::vector<Successor>* out_ = nullptr;
  bool spent_ = false;
};

}  // namespace model
