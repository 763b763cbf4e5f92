//! Name service configuration (NSS) of a static binary: hosts, users, and groups.

/// NSS services per database in a static glibc binary, as in `nsswitch.conf(5)`.
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

/// Configures NSS; call once, before the first thread starts. A binary with a static C library must not load the
/// modules that the machine's `nsswitch.conf` may name: they are built for the machine's own C library, and crash the
/// process. The files in `/etc` and the name servers of `resolv.conf` need no modules. A binary linked to the machine's
/// C library follows the machine's configuration.
pub fn use_files_and_dns() {
    #[cfg(all(target_env = "gnu", target_feature = "crt-static"))]
    {
        use std::ffi::{c_char, c_int};

        unsafe extern "C" {
            /// glibc, `nss.h`: returns 0, or -1 for an unknown database.
            fn __nss_configure_lookup(database: *const c_char, services: *const c_char) -> c_int;
        }
        for (database, services) in SERVICES {
            // SAFETY: both texts are NUL-terminated and live as long as the program; this is the only thread. A failure
            // leaves the configuration of nsswitch.conf.
            let _done = unsafe { __nss_configure_lookup(database.as_ptr(), services.as_ptr()) };
        }
    }
}
