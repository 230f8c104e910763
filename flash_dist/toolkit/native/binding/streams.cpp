// Two constructors of libstdc++ 9 and newer that torch's headers call, defined here: they are
// GLIBCXX_3.4.26, and manylinux_2_28 ends at 3.4.24. The rest of libstdc++ stays shared in the
// binding, because torch catches its exceptions: with static copies of libstdc++ and libgcc the
// first one aborts the process, with one of libstdc++ alone torch miscounts those in flight.
#include <sstream>

template std::basic_ostringstream<char>::basic_ostringstream();
template std::basic_stringstream<char>::basic_stringstream();
