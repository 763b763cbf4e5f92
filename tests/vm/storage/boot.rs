//! Boots the NFS virtual machine: a kernel with NFS client and server, and Debian's programs.
//!
//! The programs are neither installed nor started here: `examples/install-deps.sh` unpacks them.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::storage::nfs;
use berth_testkit::machine::{self, END, NFS_MODULES, Root};

/// Timeout of the virtual machine.
const LIMIT: Duration = Duration::from_secs(400);
/// Environment variable with an additional directory of the unpacked programs.
const PROGRAMS: &str = "BERTH_TEST_NFS";
/// Default directories; see [`PROGRAMS`].
const UNPACKED: [&str; 2] = ["/var/cache/berth-tests/nfs", "/"];
/// Server programs of the packages.
const SERVER: [&str; 3] = ["usr/sbin/rpc.mountd", "usr/sbin/rpc.nfsd", "usr/sbin/exportfs"];
const CLIENT: &str = "sbin/mount.nfs";
/// Libraries of the packages; their dependencies are on every machine with a Kerberos client.
const LIBRARIES: [&str; 2] = ["libtirpc.so.3", "libwrap.so.0"];
const FOLDERS: [&str; 4] =
    ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu", "usr/lib/aarch64-linux-gnu"];
/// Transports of RPC (`/etc/netconfig`).
const NETCONFIG: &str = "tcp tpi_cots_ord v inet tcp - -\nudp tpi_clts v inet udp - -\n";

fn library(unpacked: &Path, name: &str) -> Option<PathBuf> {
    FOLDERS.iter().map(|folder| unpacked.join(folder).join(name)).find(|path| path.exists())
}

/// Directory with all of the programs, if there is one.
fn programs() -> Option<PathBuf> {
    let places = std::env::var_os(PROGRAMS).map(PathBuf::from).into_iter().chain(UNPACKED.map(PathBuf::from));
    let is_whole = |place: &PathBuf| {
        SERVER.iter().chain([&CLIENT]).all(|program| place.join(program).exists())
            && LIBRARIES.iter().all(|name| library(place, name).is_some())
    };
    places.into_iter().find(is_whole)
}

/// Start script of the server, which exports directories below `/srv`.
fn second(modules: &str) -> String {
    format!(
        "ip link set lo up; hostname node
export PATH=/usr/sbin:/usr/bin:/bin LD_LIBRARY_PATH=/t/lib
{modules}
/bin/busybox ln -s /usr/sbin /sbin
mkdir -p /var/lib/nfs/v4recovery /srv /run/rpc_pipefs; echo > /var/lib/nfs/etab; echo > /var/lib/nfs/rmtab
/bin/busybox mount -t nfsd nfsd /proc/fs/nfsd; /bin/busybox mount -t rpc_pipefs rpc_pipefs /run/rpc_pipefs
exportfs -o rw,fsid=0,no_root_squash,no_subtree_check,insecure 127.0.0.1:/srv
rpc.mountd --no-nfs-version 3 --no-udp
rpc.nfsd --no-nfs-version 3 --lease-time 10 --grace-time 10 2
/t/test --ignored --exact --nocapture storage::nfs::inside 2>&1
echo '{END}'; poweroff -f
"
    )
}

#[test]
#[ignore = "takes minutes of emulation: make test-vm"]
fn shares_of_a_real_server() {
    const NAME: &str = "shares_of_a_real_server";
    let kernel = match machine::kernel() {
        Ok(kernel) => kernel,
        Err(why) => return machine::skip(NAME, why),
    };
    if !kernel.has(&NFS_MODULES) {
        return machine::skip(NAME, "the unpacked kernel lacks nfs and nfsd: examples/install-deps.sh");
    }
    let Some(programs) = programs() else {
        return machine::skip(NAME, "needs nfs-common and nfs-kernel-server, unpacked: examples/install-deps.sh");
    };
    let place = tempfile::tempdir().expect("a directory");
    let root = Root::new(place.path());
    root.program(&std::env::current_exe().expect("this program"), "t/test");
    for program in ["usr/bin/mount", "usr/bin/umount", "usr/bin/stat"] {
        root.program(&Path::new("/").join(program), program);
    }
    for program in SERVER.iter().chain([&CLIENT]) {
        root.program(&programs.join(program), &format!("usr/sbin/{}", program.rsplit('/').next().expect("a name")));
    }
    for name in LIBRARIES {
        let found = library(&programs, name).expect("looked for");
        root.program(&fs::canonicalize(found).expect("there"), &format!("t/lib/{name}"));
    }
    root.file("etc/netconfig", NETCONFIG);
    for (name, text) in [("hosts", "127.0.0.1 localhost\n"), ("services", "nfs 2049/tcp\n"), ("exports", "")] {
        root.file(&format!("etc/{name}"), text);
    }
    let image = root.pack(&kernel, &second(&machine::load(&NFS_MODULES)));
    let lines = machine::run(&kernel, &image, LIMIT);
    let failed = machine::failed(nfs::names(), &lines);
    assert!(failed.is_empty(), "{failed:?}");
    lines.iter().filter(|line| line.contains("... ok")).for_each(|line| println!("{line}"));
}
