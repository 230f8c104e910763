// Defines two constructors of libstdc++ 9 and newer that torch's headers call: they need
// GLIBCXX_3.4.26, and manylinux_2_28 allows versions up to 3.4.24. The binding shares the rest of
// libstdc++ with torch, because torch catches the binding's exceptions. With static copies of
// libstdc++ and libgcc, the process would abort at the first exception. With a static libstdc++
// alone, torch would miscount the exceptions in flight.
#include <sstream>

template std::basic_ostringstream<char>::basic_ostringstream();
template std::basic_stringstream<char>::basic_stringstream();
