//! The command line of kubelet: every flag as a row of a table, and the grammar that reads it. Pure.
//!
//! A row binds a flag to the setting it changes, so the same table parses, prints help and `/flagz`,
//! and is parsed a second time over the files so that flags win (spec 01 §1 stages 1 and 6, §2).

mod grammar;
mod help;
mod table;
mod values;

use std::collections::BTreeMap;

pub use grammar::{Parsed, parse};
pub use help::{help, values};
pub use table::FLAGS;
pub use values::sloppy_ip;
pub(super) use values::{is_taint_effect, shown as shown_taint};

use super::{
    duration::GoDuration,
    fields::{ConfigQuantity, KubeletConfiguration, MemoryReservation, Taint, VModuleItem},
};

/// What the command line can change.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Settings {
    /// What a file can say too.
    pub config: KubeletConfiguration,
    /// What only flags say.
    pub flags: KubeletFlags,
}

/// Settings without a field in the configuration file (spec 01 §2.3).
#[derive(Clone, PartialEq, Debug)]
pub struct KubeletFlags {
    /// Main configuration file; empty is none.
    pub config: String,
    /// Directory of drop-ins; empty is none.
    pub config_dir: String,
    /// Kubeconfig; empty is standalone mode.
    pub kubeconfig: String,
    /// Kubeconfig with which the first certificate is asked for.
    pub bootstrap_kubeconfig: String,
    /// The node's name instead of the host's.
    pub hostname_override: String,
    /// The node's addresses, as given.
    pub node_ip: String,
    /// Where certificates lie.
    pub cert_dir: String,
    /// Empty or `external`.
    pub cloud_provider: String,
    /// Root of the agent's files.
    pub root_dir: String,
    /// Or-ed with `seccompDefault`.
    pub seccomp_default: bool,
    /// Labels put on the node at registration.
    pub node_labels: BTreeMap<String, String>,
    /// Lock file; empty is none.
    pub lock_file: String,
    /// Whether to leave when somebody else opens the lock file.
    pub exit_on_lock_contention: bool,
    /// Cgroup of the runtime, to be watched.
    pub runtime_cgroups: String,
    /// Credential provider configuration, file or directory.
    pub image_credential_provider_config: String,
    /// Credential provider executables.
    pub image_credential_provider_bin_dir: String,
    /// Dead containers younger than this stay.
    pub minimum_container_ttl_duration: GoDuration,
    /// Dead containers kept per container name.
    pub maximum_dead_containers_per_container: i32,
    /// Dead containers kept on the node; negative is no cap.
    pub maximum_dead_containers: i32,
    /// Mounter binary; accepted, without effect.
    pub experimental_mounter_path: String,
    /// Whether hard eviction does not shrink what pods may use.
    pub experimental_allocatable_ignore_eviction: bool,
    /// Shortest period of container statistics.
    pub housekeeping_interval: GoDuration,
    /// Longest period of container statistics.
    pub max_housekeeping_interval: GoDuration,
    /// File of the boot id.
    pub boot_id_file: String,
    /// Files of the machine id, comma-separated.
    pub machine_id_file: String,
    /// Whether strict errors of the files are fatal.
    pub strict_config: bool,
    /// Policy file for callers of a node without an API server; empty is none.
    pub standalone_authorization: String,
    /// Hosts beyond this machine to which the runtime may send streams.
    pub streaming_allowed_hosts: Vec<String>,
    /// Whether opening a stream with a GET needs the right to create it too.
    pub streaming_requires_create: bool,
    /// Whether a yes about metrics and health holds on for a minute while the API server is gone.
    pub stale_authorization: bool,
    /// Whether file, drop-in or flag say where to listen: the read-only port opens to others only then.
    pub address_is_given: bool,
    /// Whether a node without an API server decides itself who may call, where a webhook is asked for.
    pub decides_alone: bool,
    /// Whether somebody says where the container runtime is.
    pub endpoint_is_given: bool,
    /// Flags of old that are accepted and do nothing, by name, where given.
    pub ignored: BTreeMap<&'static str, String>,
    /// Whether help was asked for.
    pub help: bool,
    /// What was asked about the version.
    pub version: VersionRequest,
}

impl Default for KubeletFlags {
    fn default() -> Self {
        Self {
            config: String::new(),
            config_dir: String::new(),
            kubeconfig: String::new(),
            bootstrap_kubeconfig: String::new(),
            hostname_override: String::new(),
            node_ip: String::new(),
            cert_dir: "/var/lib/kubelet/pki".to_owned(),
            cloud_provider: String::new(),
            root_dir: "/var/lib/kubelet".to_owned(),
            seccomp_default: false,
            node_labels: BTreeMap::new(),
            lock_file: String::new(),
            exit_on_lock_contention: false,
            runtime_cgroups: String::new(),
            image_credential_provider_config: String::new(),
            image_credential_provider_bin_dir: String::new(),
            minimum_container_ttl_duration: GoDuration::ZERO,
            maximum_dead_containers_per_container: 1,
            maximum_dead_containers: -1,
            experimental_mounter_path: String::new(),
            experimental_allocatable_ignore_eviction: false,
            housekeeping_interval: GoDuration::from_secs(10),
            max_housekeeping_interval: GoDuration::from_secs(15),
            boot_id_file: "/proc/sys/kernel/random/boot_id".to_owned(),
            machine_id_file: "/etc/machine-id,/var/lib/dbus/machine-id".to_owned(),
            strict_config: false,
            standalone_authorization: String::new(),
            streaming_allowed_hosts: Vec::new(),
            streaming_requires_create: true,
            stale_authorization: false,
            address_is_given: false,
            decides_alone: false,
            endpoint_is_given: false,
            ignored: BTreeMap::new(),
            help: false,
            version: VersionRequest::None,
        }
    }
}

impl KubeletFlags {
    /// Whether there is no API server.
    pub fn is_standalone(&self) -> bool {
        self.kubeconfig.is_empty()
    }

    /// Whether we decide ourselves who may call, because the API server that a webhook would ask
    /// does not exist: `berth run` does, kubelet only if given a policy.
    pub fn is_its_own_authority(&self) -> bool {
        self.is_standalone() && (self.decides_alone || !self.standalone_authorization.is_empty())
    }
}

/// What `--version` asks for.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum VersionRequest {
    /// Nothing.
    #[default]
    None,
    /// The one-line form.
    Line,
    /// All we know.
    Raw,
    /// To report this version instead of our own.
    Override(String),
}

/// How `k=v` lists are written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pairs {
    /// `k=v,k=v`.
    Equal,
    /// One `k=v` per use; the value may hold commas.
    Single,
    /// `k<v,k<v`.
    Below,
}

/// A setting of type `T`.
pub type Lens<T> = fn(&mut Settings) -> &mut T;

/// The setting a flag changes, and thereby the syntax of its value (spec 01 §2.2).
#[derive(Clone, Copy)]
pub enum Slot {
    /// `true`, `false` and their short forms; alone it is true.
    Bool(Lens<bool>),
    /// A number.
    Int32(Lens<i32>),
    /// A number.
    Int64(Lens<i64>),
    /// A log level.
    Level(Lens<u32>),
    /// Any text.
    Text(Lens<String>),
    /// A Go duration.
    Duration(Lens<GoDuration>),
    /// A quantity.
    Quantity(Lens<ConfigQuantity>),
    /// Texts with commas between.
    Texts(Lens<Vec<String>>),
    /// Keys and values.
    Pairs(Pairs, Lens<BTreeMap<String, String>>),
    /// Keys and booleans.
    Gates(Lens<BTreeMap<String, bool>>),
    /// Headers.
    Headers(Lens<BTreeMap<String, Vec<String>>>),
    /// Labels; uses add up.
    Labels(Lens<BTreeMap<String, String>>),
    /// An address; empty changes nothing.
    Ip(Lens<String>),
    /// Memory per NUMA node.
    ReservedMemory(Lens<Vec<MemoryReservation>>),
    /// Taints; each use replaces all.
    Taints(Lens<Vec<Taint>>),
    /// `file=level` pairs.
    VModule(Lens<Vec<VModuleItem>>),
    /// `--version`.
    Version(Lens<VersionRequest>),
    /// Read and forgotten; with the default that is shown.
    Ignored(Ignored, &'static str),
}

/// The syntax of a flag that does nothing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ignored {
    /// A boolean.
    Bool,
    /// A number.
    Int,
    /// A text.
    Text,
    /// A duration.
    Duration,
}

/// One flag.
#[derive(Clone, Copy)]
pub struct Flag {
    /// Long name.
    pub name: &'static str,
    /// One-letter name.
    pub shorthand: Option<char>,
    /// What it changes.
    pub slot: Slot,
    /// What help says.
    pub help: &'static str,
    /// What its use prints, if it should not be used.
    pub deprecated: Option<&'static str>,
}

impl Flag {
    /// What the flag is worth when it stands alone, without a value.
    fn alone(&self) -> Option<&'static str> {
        matches!(self.slot, Slot::Bool(_) | Slot::Version(_) | Slot::Ignored(Ignored::Bool, _)).then_some("true")
    }

    /// The line printed when a deprecated flag is used.
    pub fn deprecation(&self) -> Option<String> {
        self.deprecated.map(|message| format!("Flag --{} has been deprecated, {message}", self.name))
    }
}

/// The flag of that name; `_` is as good as `-`.
pub fn find(name: &str) -> Option<&'static Flag> {
    let name = name.replace('_', "-");
    FLAGS.iter().find(|flag| flag.name == name)
}

#[cfg(test)]
mod tests;
