//! Files a sandbox provides to its containers: hostname, hosts, resolv.conf, shared memory.
//!
//! Implements spec 09a §2.2.

use std::{fs, io, path::Path};

use nix::mount::{MntFlags, MsFlags, mount, umount2};

use crate::{
    errors::{RuntimeError, RuntimeResult},
    store,
};
use berth_proto::cri;
use berth_sys::atomic_file;

/// Mount options of a pod's shared memory.
const SHARED_MEMORY: &str = "mode=1777,size=67108864";

/// Writes `hostname`, `hosts`, and `resolv.conf`.
///
/// # Errors
/// The I/O error.
pub fn write(directory: &Path, config: &cri::PodSandboxConfig, node: &str) -> RuntimeResult<()> {
    let hostname = if config.hostname.is_empty() { node } else { &config.hostname };
    let resolver = match &config.dns_config {
        Some(dns) => resolver(dns).into_bytes(),
        None => host_file("/etc/resolv.conf")?,
    };
    for (name, content) in [
        ("hostname", format!("{hostname}\n").into_bytes()),
        ("hosts", host_file("/etc/hosts")?),
        ("resolv.conf", resolver),
    ] {
        let path = directory.join(name);
        let written = atomic_file::replace_unsynced(&path, &content, 0o644);
        written.map_err(|e| RuntimeError::file("write", &path, &e))?;
    }
    Ok(())
}

fn host_file(path: &str) -> RuntimeResult<Vec<u8>> {
    match fs::read(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        other => other.map_err(|e| RuntimeError::file("read", Path::new(path), &e)),
    }
}

/// Content of `resolv.conf`; empty parts are omitted.
fn resolver(dns: &cri::DnsConfig) -> String {
    let mut text = String::new();
    if !dns.searches.is_empty() {
        text += &format!("search {}\n", dns.searches.join(" "));
    }
    for server in &dns.servers {
        text += &format!("nameserver {server}\n");
    }
    if !dns.options.is_empty() {
        text += &format!("options {}\n", dns.options.join(" "));
    }
    text
}

/// Whether the pod uses the host's IPC namespace.
pub fn has_host_ipc(config: &cri::PodSandboxConfig) -> bool {
    let context = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
    let options = context.and_then(|context| context.namespace_options.as_ref());
    options.is_some_and(|options| options.ipc() == cri::NamespaceMode::Node)
}

/// Mounts a tmpfs as the pod's shared memory, unless the pod uses the host's IPC namespace.
///
/// # Errors
/// The error of `mkdir` or `mount`.
pub fn mount_shared_memory(config: &cri::PodSandboxConfig, path: &Path) -> RuntimeResult<()> {
    if has_host_ipc(config) {
        return Ok(());
    }
    store::make_directory(path, 0o1777)?;
    let flags = MsFlags::MS_NOEXEC | MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    let mounted = mount(Some("shm"), path, Some("tmpfs"), flags, Some(SHARED_MEMORY));
    mounted.map_err(|e| RuntimeError::file("mount /dev/shm on", path, &e.into()))
}

/// Unmounts a pod's shared memory; succeeds if it is not mounted.
///
/// # Errors
/// The error of `umount`.
pub fn unmount_shared_memory(path: &Path) -> RuntimeResult<()> {
    use nix::errno::Errno;
    match umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
        // Not mounted, or no such path.
        Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => Ok(()),
        Err(e) => Err(RuntimeError::file("unmount", path, &e.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_parts_of_a_resolver_are_left_out() {
        let words = |all: &[&str]| all.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
        let dns = |servers: &[&str], searches: &[&str], options: &[&str]| cri::DnsConfig {
            servers: words(servers),
            searches: words(searches),
            options: words(options),
        };
        assert_eq!(resolver(&dns(&[], &[], &[])), "");
        assert_eq!(
            resolver(&dns(&["1.1.1.1", "::1"], &["a", "b"], &["ndots:5", "x"])),
            "search a b\nnameserver 1.1.1.1\nnameserver ::1\noptions ndots:5 x\n"
        );
    }
}
