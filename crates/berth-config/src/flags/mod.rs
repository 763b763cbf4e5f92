//! kubelet command line: a table of all flags, and the grammar that parses them. Pure.
//!
//! A row binds a flag to the setting it changes. The same table serves parsing, help, and `/flagz`, and is applied a
//! second time over the files so that flags take precedence (spec 01 §1 stages 1 and 6, §2).

mod grammar;
mod help;
mod table;
mod values;

use std::collections::BTreeMap;

pub use grammar::{ParsedArguments, parse};
pub use help::{help, values};
pub use table::FLAGS;
pub use values::sloppy_ip;
pub(super) use values::{is_taint_effect, shown as shown_taint};

use super::{
    GoDuration,
    fields::{ConfigQuantity, KubeletConfiguration, MemoryReservation, Taint, VModuleItem},
};

/// Settings that the command line can change.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct KubeletSettings {
    /// Settings with a field in the configuration file.
    pub config: KubeletConfiguration,
    /// Settings that exist as flags only.
    pub flags: KubeletFlags,
}

/// Settings without a field in the configuration file (spec 01 §2.3).
#[derive(Clone, PartialEq, Debug)]
pub struct KubeletFlags {
    /// `--config`: main configuration file; empty for none.
    pub config: String,
    /// `--config-dir`: directory of drop-ins; empty for none.
    pub config_dir: String,
    /// `--kubeconfig`; empty for standalone mode.
    pub kubeconfig: String,
    /// `--bootstrap-kubeconfig`: kubeconfig with which the first client certificate is requested.
    pub bootstrap_kubeconfig: String,
    /// `--hostname-override`: node name instead of the hostname.
    pub hostname_override: String,
    /// `--node-ip`: addresses of the node, as given.
    pub node_ip: String,
    /// `--cert-dir`: directory of the certificates.
    pub cert_dir: String,
    /// `--cloud-provider`: empty or `external`.
    pub cloud_provider: String,
    /// `--root-dir`: root directory of the agent's files.
    pub root_dir: String,
    /// `--seccomp-default`; combined with `seccompDefault` by a logical or.
    pub seccomp_default: bool,
    /// `--node-labels`: labels that the node registers with.
    pub node_labels: BTreeMap<String, String>,
    /// `--lock-file`; empty for none.
    pub lock_file: String,
    /// Whether the agent exits when another process opens the lock file.
    pub exit_on_lock_contention: bool,
    /// `--runtime-cgroups`: cgroup of the runtime, reported in statistics.
    pub runtime_cgroups: String,
    /// Configuration of credential providers: a file or a directory.
    pub image_credential_provider_config: String,
    /// Directory of the credential provider executables.
    pub image_credential_provider_bin_dir: String,
    /// Minimum age of dead containers before they are removed.
    pub minimum_container_ttl_duration: GoDuration,
    /// Maximum number of dead instances kept per container name.
    pub maximum_dead_containers_per_container: i32,
    /// Maximum number of dead containers kept on the node; negative for no limit.
    pub maximum_dead_containers: i32,
    /// Mounter binary; accepted, but without effect.
    pub experimental_mounter_path: String,
    /// Whether hard eviction thresholds are excluded from the computation of allocatable resources.
    pub experimental_allocatable_ignore_eviction: bool,
    /// Minimum interval of container statistics; without effect: they are read on request.
    pub housekeeping_interval: GoDuration,
    /// Maximum interval of container statistics; without effect, as in kubelet.
    pub max_housekeeping_interval: GoDuration,
    /// Files that may contain the boot ID, comma-separated.
    pub boot_id_file: String,
    /// Files that may contain the machine ID, comma-separated.
    pub machine_id_file: String,
    /// Whether strict errors of the configuration files are fatal.
    pub strict_config: bool,
    /// Authorization policy file of a node without an API server; empty for none.
    pub standalone_authorization: String,
    /// Hosts other than this machine to which the runtime may redirect streams.
    pub streaming_allowed_hosts: Vec<String>,
    /// Whether a GET that opens a stream requires the verb `create` too.
    pub streaming_requires_create: bool,
    /// Whether access to metrics and health remains granted for a minute while the API server is unreachable.
    pub stale_authorization: bool,
    /// Whether file, drop-in, or flag set the listen address: only then is the read-only port opened to other hosts.
    pub is_address_set: bool,
    /// Whether a node without an API server authorizes requests itself where a webhook is configured.
    pub is_standalone_authorizer: bool,
    /// Whether file, drop-in, or flag set the container runtime endpoint.
    pub is_endpoint_set: bool,
    /// Values of legacy flags that are accepted without effect, by name, if given.
    pub ignored: BTreeMap<&'static str, String>,
    /// Whether `--help` was given.
    pub help: bool,
    /// Requested version output.
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
            is_address_set: false,
            is_standalone_authorizer: false,
            is_endpoint_set: false,
            ignored: BTreeMap::new(),
            help: false,
            version: VersionRequest::None,
        }
    }
}

impl KubeletFlags {
    /// Whether the node runs without an API server.
    pub fn is_standalone(&self) -> bool {
        self.kubeconfig.is_empty()
    }

    /// Whether the node authorizes requests itself, because the API server for the webhook does not exist: always with
    /// `berth run`, as kubelet only with a policy.
    pub fn is_its_own_authority(&self) -> bool {
        self.is_standalone() && (self.is_standalone_authorizer || !self.standalone_authorization.is_empty())
    }
}

/// Value of `--version`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum VersionRequest {
    /// No version output.
    #[default]
    None,
    /// One-line output.
    Line,
    /// Complete output.
    Raw,
    /// Reports this version instead of the built-in one.
    Override(String),
}

/// Notation of `k=v` lists.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Pairs {
    /// `k=v,k=v`.
    Equal,
    /// One `k=v` per use; the value may hold commas.
    Single,
    /// `k<v,k<v`.
    Below,
}

/// Accessor of a setting of type `T`.
pub type Lens<T> = fn(&mut KubeletSettings) -> &mut T;

/// Setting that a flag changes; determines the syntax of its value (spec 01 §2.2).
#[derive(Clone, Copy)]
pub enum FlagTarget {
    /// A boolean, `true` or `false` and their short forms; without a value it is true.
    Bool(Lens<bool>),
    /// A 32-bit integer.
    Int32(Lens<i32>),
    /// A 64-bit integer.
    Int64(Lens<i64>),
    /// A log verbosity level.
    Level(Lens<u32>),
    /// Any text.
    Text(Lens<String>),
    /// A duration in Go's notation.
    Duration(Lens<GoDuration>),
    /// A resource quantity.
    Quantity(Lens<ConfigQuantity>),
    /// Comma-separated texts.
    Texts(Lens<Vec<String>>),
    /// Pairs of key and value.
    Pairs(Pairs, Lens<BTreeMap<String, String>>),
    /// Pairs of feature gate and boolean.
    Gates(Lens<BTreeMap<String, bool>>),
    /// HTTP headers.
    Headers(Lens<BTreeMap<String, Vec<String>>>),
    /// Labels; repeated uses accumulate.
    Labels(Lens<BTreeMap<String, String>>),
    /// An IP address; an empty value changes nothing.
    Ip(Lens<String>),
    /// Reserved memory per NUMA node.
    ReservedMemory(Lens<Vec<MemoryReservation>>),
    /// Taints; each use replaces all of them.
    Taints(Lens<Vec<Taint>>),
    /// `file=level` pairs.
    VModule(Lens<Vec<VModuleItem>>),
    /// `--version`.
    Version(Lens<VersionRequest>),
    /// Validated and without effect; with the default that is shown.
    Ignored(ValueSyntax, &'static str),
}

/// Value syntax of a flag without effect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ValueSyntax {
    /// A boolean.
    Bool,
    /// An integer.
    Int,
    /// Any text.
    Text,
    /// Go duration, such as `1m0s`.
    Duration,
}

/// A flag of the command line.
#[derive(Clone, Copy)]
pub struct Flag {
    /// Long name, without dashes.
    pub name: &'static str,
    /// One-letter shorthand.
    pub shorthand: Option<char>,
    /// Setting that the flag changes.
    pub slot: FlagTarget,
    /// Help text.
    pub help: &'static str,
    /// Deprecation message; `None` if the flag is not deprecated.
    pub deprecated: Option<&'static str>,
}

impl Flag {
    /// Value of the flag when it is given without one; `None` if it requires a value.
    fn value_if_bare(&self) -> Option<&'static str> {
        matches!(self.slot, FlagTarget::Bool(_) | FlagTarget::Version(_) | FlagTarget::Ignored(ValueSyntax::Bool, _))
            .then_some("true")
    }

    /// Warning for the use of a deprecated flag.
    pub fn deprecation(&self) -> Option<String> {
        self.deprecated.map(|message| format!("Flag --{} has been deprecated, {message}", self.name))
    }
}

/// Finds a flag by name; `_` is equivalent to `-`.
pub fn find(name: &str) -> Option<&'static Flag> {
    let name = name.replace('_', "-");
    FLAGS.iter().find(|flag| flag.name == name)
}

#[cfg(test)]
mod tests;
