//! How a static program looks up names: of hosts, users and groups.

/// Where each kind of name is looked up in a static program; glibc, `nsswitch.conf(5)`.
#[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
const SERVICES: &[(&std::ffi::CStr, &std::ffi::CStr)] = &[
    (c"hosts", c"files dns"),
    (c"passwd", c"files"),
    (c"group", c"files"),
    (c"initgroups", c"files"),
    (c"shadow", c"files"),
    (c"gshadow", c"files"),
    (c"services", c"files"),
    (c"protocols", c"files"),
    (c"networks", c"files"),
    (c"netgroup", c"files"),
    (c"rpc", c"files"),
    (c"ethers", c"files"),
    (c"aliases", c"files"),
    (c"publickey", c"files"),
];

/// Call once, before the first thread is started. A program with the C library within must not load the modules that the
/// machine's `nsswitch.conf` may name: they are made for the machine's own C library, and the process dies in them. The
/// files in `/etc` and the name servers of `resolv.conf` need none. A program that is linked to the machine's library
/// does as the machine says.
pub fn use_files_and_dns() {
    #[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
    {
        use std::ffi::{c_char, c_int};

        unsafe extern "C" {
            /// glibc, `nss.h`: 0, or -1 where it knows no such database.
            fn __nss_configure_lookup(database: *const c_char, services: *const c_char) -> c_int;
        }
        for (database, services) in SERVICES {
            // SAFETY: both texts end in a zero byte and live as long as the program; this is the only
            // thread. A refusal leaves what nsswitch.conf says.
            let _done = unsafe { __nss_configure_lookup(database.as_ptr(), services.as_ptr()) };
        }
    }
}
