//! Loads the configuration from a command line: stages 1 to 8 of spec 01 §1, and independent checks.
//!
//! The only file that reads configuration files, besides `dropins`. Notices are returned as values, because logging is
//! not set up before the configuration is known.

use std::{
    env,
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use super::{
    configz, defaults, dropins,
    errors::StartupError,
    fields::{KubeletConfiguration, LoggingConfiguration},
    file_decoder,
    flags::{self, KubeletFlags, KubeletSettings, ParsedArguments, VersionRequest},
    gated_settings::settings_without_gate,
    gates::FeatureGates,
    host::HostFacts,
    notice::Notice,
    text::quote,
    unimplemented_settings::unimplemented_settings,
    validation::{self, startup},
    version,
    watchdog::watchdog_timeout,
};

/// Program name of the invocation; it determines the defaults without a configuration file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Personality {
    /// `kubelet`: the reference's legacy defaults, with anonymous access and without authorization.
    Kubelet,
    /// `berth run`: the secure defaults of a file; each insecure setting must be set explicitly.
    Berth,
}

/// Value of `containerRuntimeEndpoint` that selects the embedded runtime.
pub const EMBEDDED_RUNTIME: &str = "embedded";

/// The loaded configuration: everything that is known before anything is started.
#[derive(Clone, Debug)]
pub struct LoadedConfig {
    /// Effective configuration: defaulted and validated.
    pub config: KubeletConfiguration,
    /// Settings that exist as flags only.
    pub flags: KubeletFlags,
    /// Effective feature gates.
    pub gates: FeatureGates,
    /// Value of every flag, from built-in defaults and the command line, for `/flagz` and the log.
    pub flag_values: std::collections::BTreeMap<&'static str, String>,
    /// Version that the node reports.
    pub version: String,
    /// Facts about this machine with which the configuration was validated.
    pub host: HostFacts,
    /// Watchdog timeout of the service manager; `None` if it does not watch this process.
    pub watchdog: Option<Duration>,
    /// Notices to log first.
    pub notices: Vec<Notice>,
}

impl LoadedConfig {
    /// The agent's root directory: `--root-dir`.
    pub fn root_directory(&self) -> PathBuf {
        PathBuf::from(&self.flags.root_dir)
    }

    /// Whether the node runs without an API server.
    pub fn is_standalone(&self) -> bool {
        self.flags.is_standalone()
    }

    /// Whether pods run on the embedded runtime: `containerRuntimeEndpoint` is `embedded`, or is not set and the
    /// program was started as `berth run`. As `kubelet` the reference's default applies, so that its units and files
    /// keep their meaning.
    pub fn is_runtime_embedded(&self) -> bool {
        let (endpoint, flags) = (&self.config.container_runtime_endpoint, &self.flags);
        endpoint == EMBEDDED_RUNTIME || (flags.is_standalone_authorizer && !flags.is_endpoint_set)
    }

    /// Whether `RuntimeDefault` is the default seccomp profile, by flag or field.
    pub fn seccomp_default(&self) -> bool {
        self.flags.seccomp_default || self.config.seccomp_default
    }
}

/// Action that a command line requests.
#[derive(Clone, Debug)]
pub enum StartupAction {
    /// Run the agent.
    Run(Box<LoadedConfig>),
    /// Print this text and exit with code 0.
    Print(String),
}

/// Result of loading.
#[derive(Debug)]
pub struct LoadResult {
    /// Deprecation warnings of flags, to be printed to standard error before all else.
    pub deprecations: Vec<String>,
    /// Notices collected before a failure; on success the notices are in [`LoadedConfig`].
    pub notices: Vec<Notice>,
    /// Logging settings, as far as the configuration was loaded; otherwise the defaults.
    pub logging: LoggingConfiguration,
    /// The requested action, or the reason for the failure.
    pub outcome: Result<StartupAction, StartupError>,
}

/// Parses the command line `args` (without the program name) and loads the files it names.
pub fn load(personality: Personality, args: &[OsString], host: &HostFacts) -> LoadResult {
    let mut settings = base(personality);
    let parsed = match flags::parse(args, &mut settings) {
        Ok(parsed) => parsed,
        Err(cause) => return failed(StartupError::ParseFlag(cause)),
    };
    let mut load_log = LoadLog::default();
    let outcome = resolve(&LoadContext { personality, args, parsed: &parsed, host }, settings, &mut load_log);
    LoadResult { deprecations: parsed.deprecations, notices: load_log.notices, logging: load_log.logging, outcome }
}

fn failed(error: StartupError) -> LoadResult {
    let LoadLog { notices, logging } = LoadLog::default();
    LoadResult { deprecations: Vec::new(), notices, logging, outcome: Err(error) }
}

/// Notices and logging settings collected so far.
struct LoadLog {
    notices: Vec<Notice>,
    logging: LoggingConfiguration,
}

impl Default for LoadLog {
    fn default() -> Self {
        Self { notices: Vec::new(), logging: defaults::defaults().logging }
    }
}

/// Returns the settings before the command line is parsed.
fn base(personality: Personality) -> KubeletSettings {
    let mut config = defaults::defaults();
    if personality == Personality::Kubelet {
        defaults::legacy_overrides(&mut config);
    }
    let decides_alone = personality == Personality::Berth;
    KubeletSettings {
        config,
        flags: KubeletFlags { is_standalone_authorizer: decides_alone, ..KubeletFlags::default() },
    }
}

/// Returns the help text of the flags.
pub fn help(personality: Personality) -> String {
    flags::help(&base(personality))
}

struct LoadContext<'a> {
    personality: Personality,
    args: &'a [OsString],
    parsed: &'a ParsedArguments,
    host: &'a HostFacts,
}

fn resolve(
    given: &LoadContext<'_>,
    first: KubeletSettings,
    load_log: &mut LoadLog,
) -> Result<StartupAction, StartupError> {
    if let Some(word) = given.parsed.words.first() {
        return Err(StartupError::UnknownCommand(word.clone()));
    }
    if first.flags.help {
        return Ok(StartupAction::Print(help(given.personality)));
    }
    let version = match &first.flags.version {
        VersionRequest::Line => return Ok(StartupAction::Print(format!("Kubernetes {}\n", version::VERSION))),
        VersionRequest::Raw => return Ok(StartupAction::Print(format!("{}\n", version::raw(version::VERSION)))),
        VersionRequest::Override(version) => version.clone(),
        VersionRequest::None => version::VERSION.to_owned(),
    };
    let mut gates = FeatureGates::new();
    load_log.notices.extend(gates.set_from_map(&first.config.feature_gates).map_err(StartupError::InitialGates)?);
    startup::node_labels(&first.flags.node_labels).map_err(StartupError::ValidateFlags)?;
    let flag_values = flags::values(&first);
    let settings = over_files(given, first, &gates, &mut load_log.notices)?;
    for notice in gates.set_from_map(&settings.config.feature_gates).map_err(StartupError::Gates)? {
        if !load_log.notices.contains(&notice) {
            load_log.notices.push(notice);
        }
    }
    validate_settings(&settings, &gates, given.host, load_log)?;
    let KubeletSettings { mut config, flags } = settings;
    load_log.notices.extend(startup::overwrite_cpus(&mut config));
    load_log.notices.extend(without_effect(&config, &flags, &gates));
    let watchdog = watchdog_timeout(&given.host.watchdog).map_err(StartupError::Run)?;
    let (notices, host) = (std::mem::take(&mut load_log.notices), given.host.clone());
    Ok(StartupAction::Run(Box::new(LoadedConfig {
        config,
        flags,
        gates,
        flag_values,
        version,
        host,
        watchdog,
        notices,
    })))
}

/// Stages 4 to 6: loads the file, merges the drop-ins over it, and applies the flags over both.
fn over_files(
    given: &LoadContext<'_>,
    first: KubeletSettings,
    gates: &FeatureGates,
    notices: &mut Vec<Notice>,
) -> Result<KubeletSettings, StartupError> {
    let KubeletSettings { mut config, mut flags } = first;
    flags.is_address_set = given.parsed.given.contains(&"address");
    flags.is_endpoint_set = given.parsed.given.contains(&"container-runtime-endpoint");
    if flags.config.is_empty() && flags.config_dir.is_empty() {
        return Ok(KubeletSettings { config, flags });
    }
    if !flags.config.is_empty() {
        let failed = |cause| StartupError::LoadFile { path: flags.config.clone(), cause };
        let text = read_text(&flags.config).map_err(failed)?;
        let (loaded, file_notices) = main_file(&flags.config, &text, gates).map_err(failed)?;
        flags.is_address_set |= file_decoder::sets(&text.content, "address");
        flags.is_endpoint_set |= file_decoder::sets(&text.content, "containerRuntimeEndpoint");
        config = loaded;
        notices.extend(file_notices);
    }
    if !flags.config_dir.is_empty() {
        let (merged, dropin_notices) =
            dropins::merge_directory(&config, &flags.config_dir, gates).map_err(StartupError::MergeDropins)?;
        config = merged;
        flags.is_address_set |= dropin_notices.iter().any(|notice| notice.sets("address"));
        flags.is_endpoint_set |= dropin_notices.iter().any(|notice| notice.sets("containerRuntimeEndpoint"));
        notices.extend(dropin_notices);
    }
    if flags.strict_config
        && let Some(cause) = notices.iter().find_map(Notice::strict_error)
    {
        return Err(StartupError::LoadFile { path: flags.config.clone(), cause });
    }
    let in_files = config.feature_gates.clone();
    let mut settings = KubeletSettings { config, flags: KubeletFlags::default() };
    flags::parse(given.args, &mut settings).map_err(StartupError::FlagPrecedence)?;
    for (gate, value) in in_files {
        settings.config.feature_gates.entry(gate).or_insert(value);
    }
    Ok(KubeletSettings { config: settings.config, flags })
}

/// Loads the main file at `path`, relative to the working directory.
///
/// # Errors
/// The file cannot be used; contains the reference's text.
pub fn read_main(path: &str, gates: &FeatureGates) -> Result<(KubeletConfiguration, Vec<Notice>), String> {
    main_file(path, &read_text(path)?, gates)
}

/// Content of a main file.
struct MainText {
    /// Absolute directory of the file.
    directory: String,
    content: String,
}

fn wrapped(path: &str, cause: &str) -> String {
    format!("failed to load Kubelet config file {path}, error {cause}")
}

fn main_file(path: &str, text: &MainText, gates: &FeatureGates) -> Result<(KubeletConfiguration, Vec<Notice>), String> {
    file_decoder::main_file(&text.content, &text.directory, gates).map_err(|cause| wrapped(path, &cause))
}

fn read_text(path: &str) -> Result<MainText, String> {
    let absolute = absolute(path)?;
    let wrapped = |cause: String| wrapped(path, &cause);
    let bytes = fs::read(&absolute).map_err(|e| {
        let cause = dropins::errno_text(&e);
        wrapped(format!("failed to read kubelet config file {}, error: open {absolute}: {cause}", quote(&absolute)))
    })?;
    if bytes.is_empty() {
        return Err(wrapped(format!("kubelet config file {} was empty", quote(&absolute))));
    }
    let content = String::from_utf8(bytes).map_err(|_| wrapped(file_decoder::NOT_UTF8.to_owned()))?;
    let directory = Path::new(&absolute).parent().map(|p| p.display().to_string()).unwrap_or_default();
    Ok(MainText { directory, content })
}

/// Placeholder for the kubeconfig of a cluster node; it is never read.
const ANY_KUBECONFIG: &str = "kubeconfig";

/// Validates a main file and its drop-ins with the startup validation, as far as that is possible without the command
/// line, and independent of this machine, which need not be the one the file is for.
///
/// # Errors
/// The failed stage, with the reference's text.
pub fn check(path: &str, drop_ins: Option<&str>) -> Result<Vec<Notice>, StartupError> {
    let host = HostFacts::default();
    let mut gates = FeatureGates::new();
    let failed = |cause| StartupError::LoadFile { path: path.to_owned(), cause };
    let (mut config, mut notices) = read_main(path, &gates).map_err(failed)?;
    if let Some(directory) = drop_ins {
        let (merged, dropin_notices) =
            dropins::merge_directory(&config, directory, &gates).map_err(StartupError::MergeDropins)?;
        config = merged;
        notices.extend(dropin_notices);
    }
    notices.extend(gates.set_from_map(&config.feature_gates).map_err(StartupError::Gates)?);
    // Assumes a node of a cluster, which most files are for: some settings are invalid without an API server.
    let flags = KubeletFlags { kubeconfig: ANY_KUBECONFIG.to_owned(), ..KubeletFlags::default() };
    let settings = KubeletSettings { config, flags };
    let mut load_log = LoadLog { notices, ..LoadLog::default() };
    validate_settings(&settings, &gates, &host, &mut load_log)?;
    load_log.notices.extend(without_effect(&settings.config, &settings.flags, &gates));
    Ok(load_log.notices)
}

/// Notices of settings without effect.
fn without_effect(config: &KubeletConfiguration, flags: &KubeletFlags, gates: &FeatureGates) -> Vec<Notice> {
    let unimplemented = unimplemented_settings(config, flags).into_iter().map(Notice::NotYetEffective);
    unimplemented.chain(settings_without_gate(config, gates)).collect()
}

fn absolute(path: &str) -> Result<String, String> {
    if path.starts_with('/') {
        return Ok(super::text::clean_path(path));
    }
    let here = env::current_dir().map_err(|e| format!("cannot get the working directory: {e}"))?;
    Ok(super::text::clean_path(&format!("{}/{path}", here.display())))
}

/// Stages 7 to 11, as far as they do not require the machine itself.
fn validate_settings(
    settings: &KubeletSettings,
    gates: &FeatureGates,
    host: &HostFacts,
    load_log: &mut LoadLog,
) -> Result<(), StartupError> {
    let KubeletSettings { config, flags } = settings;
    validate_logging(config, gates)?;
    load_log.logging.clone_from(&config.logging);
    load_log.notices.extend(validate_config(config, gates, host)?);
    load_log.notices.extend(startup::run(config, flags, host).map_err(StartupError::Run)?);
    Ok(())
}

/// Stage 7: validates the logging settings.
fn validate_logging(config: &KubeletConfiguration, gates: &FeatureGates) -> Result<(), StartupError> {
    let wrong = validation::log_settings(config, gates);
    if wrong.is_empty() { Ok(()) } else { Err(StartupError::Logging(wrong)) }
}

/// Stages 8 and 9: validates the configuration and its TLS options.
fn validate_config(
    config: &KubeletConfiguration,
    gates: &FeatureGates,
    host: &HostFacts,
) -> Result<Vec<Notice>, StartupError> {
    validation::validate(config, gates, host)
        .map_err(|errors| StartupError::Validate { errors, dump: configz::masked(config) })?;
    startup::tls_options(config).map_err(StartupError::Dependencies)
}

#[cfg(test)]
mod tests;
