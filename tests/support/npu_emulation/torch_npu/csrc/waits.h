// Records where a real device would be waited for; here everything is synchronous.
#pragma once
#include <string>
#include <vector>

#include "aliases.h"

namespace emulation {

struct Waits {
  bool are_watched = false;
  std::vector<std::string> found;
};
inline thread_local Waits waits;

inline void note_wait(const std::string& what) {
  if (waits.are_watched) waits.found.push_back(what);
}

// A copy between host and device waits unless it is non-blocking and the host memory is pinned.
inline void note_copy(const Tensor& target, const Tensor& source, bool is_async) {
  if (!waits.are_watched || target.is_cpu() == source.is_cpu()) return;
  const Tensor& on_host = target.is_cpu() ? target : source;
  if (is_async && on_host.is_pinned()) return;
  note_wait(c10::str("a ", is_async ? "pageable" : "blocking", " copy of ", source.sizes(),
                     target.is_cpu() ? " to" : " from", " the host"));
}

// Starts or stops recording; returns the waits since the last call.
inline std::vector<std::string> watch_waits(bool are_watched) {
  std::vector<std::string> found = std::move(waits.found);
  waits = {are_watched, {}};
  return found;
}

}  // namespace emulation
