//! Validation of logging, tracing, and memory QoS settings. Pure. Spec 01 §6.3, §16.

use super::{Failures, ValidationInput};
use crate::{
    fields::{LoggingConfiguration, OutputRoutingOptions, TracingConfiguration},
    gates::FeatureGates,
    text::quote,
};

const NAMING: &str = "See https://github.com/grpc/grpc/blob/master/doc/naming.md";

/// Applies the rules from logging to memory QoS.
pub(super) fn check(ValidationInput { config: c, gates, .. }: ValidationInput<'_>, f: &mut Failures) {
    for failure in logging(&c.logging, gates) {
        f.bare(failure);
    }
    if let Some(tracing) = &c.tracing {
        check_tracing(tracing, f);
    }
    let qos = gates.enabled("MemoryQoS");
    match c.memory_throttling_factor {
        None if qos => f.invalid("memoryThrottlingFactor is required when MemoryQoS feature flag is enabled"),
        Some(factor) if !(factor > 0.0 && factor <= 1.0) => {
            f.invalid(format!("memoryThrottlingFactor {factor} must be greater than 0 and less than or equal to 1.0"))
        }
        _ => {}
    }
    match c.memory_reservation_policy.as_str() {
        "TieredReservation" if !qos => {
            f.invalid("memoryReservationPolicy \"TieredReservation\" requires MemoryQoS feature gate to be enabled");
        }
        "None" | "TieredReservation" => {}
        other => f.invalid(format!(
            "option {} specified for memoryReservationPolicy. Valid options are \"None\" or \"TieredReservation\"",
            quote(other)
        )),
    }
}

/// Returns the errors of the logging settings.
pub(crate) fn logging(c: &LoggingConfiguration, gates: &FeatureGates) -> Vec<String> {
    let mut failures = Vec::new();
    match c.format.as_str() {
        "text" => {}
        "json" if gates.enabled("LoggingBetaOptions") => {}
        "json" => failures
            .push("logging.format: Forbidden: Log format json is disabled, see LoggingBetaOptions feature".to_owned()),
        other => failures.push(format!("logging.format: Invalid value: {}: Unsupported log format", quote(other))),
    }
    let flush = c.flush_frequency;
    if flush.duration.nanos() <= 0 {
        failures.push(format!(
            "logging.flushFrequency: Invalid value: {}: Must be greater than zero",
            quote(&flush.duration.to_string())
        ));
    }
    let too_loud = |path: &str, level: u32| {
        (i32::try_from(level).is_err()).then(|| format!("{path}: Invalid value: {level}: Must be <= {}", i32::MAX))
    };
    failures.extend(too_loud("logging.verbosity", c.verbosity));
    if !c.vmodule.is_empty() && c.format != "text" {
        failures.push("logging.vmodule: Forbidden: Only supported for text log format".to_owned());
    }
    for (i, item) in c.vmodule.iter().enumerate() {
        let path = format!("logging.vmodule[{i}]");
        if item.file_pattern.is_empty() {
            failures.push(format!("{path}: Required value: File pattern must not be empty"));
        }
        if item.file_pattern.contains(['=', ',']) {
            failures.push(format!(
                "{path}: Invalid value: {}: File pattern must not contain equal sign or comma",
                quote(&item.file_pattern)
            ));
        }
        failures.extend(too_loud(&path, item.verbosity));
    }
    if !gates.enabled("LoggingAlphaOptions") {
        failures.extend(alpha("text", &c.options.text).chain(alpha("json", &c.options.json)));
    }
    failures
}

/// Returns the errors of options that must have their default while the alpha gate is off.
fn alpha<'a>(format: &'a str, options: &OutputRoutingOptions) -> impl Iterator<Item = String> + use<'a> {
    let used =
        [("splitStream", options.split_stream), ("infoBufferSize", !options.info_buffer_size.amount().is_zero())];
    used.into_iter().filter(|(_, used)| *used).map(move |(option, _)| {
        format!("logging.options.{format}.{option}: Forbidden: Feature LoggingAlphaOptions is disabled")
    })
}

fn check_tracing(c: &TracingConfiguration, f: &mut Failures) {
    if let Some(rate) = c.sampling_rate_per_million {
        let path = "tracing.samplingRatePerMillion: Invalid value";
        if rate < 0 {
            f.bare(format!("{path}: {rate}: sampling rate must be positive"));
        }
        if rate > 1_000_000 {
            f.bare(format!("{path}: {rate}: sampling rate per million must be less than or equal to one million"));
        }
    }
    let Some(endpoint) = &c.endpoint else { return };
    let full = if endpoint.contains("//") { endpoint.clone() } else { format!("dns://{endpoint}") };
    let scheme = full.split(':').next().unwrap_or_default();
    if !matches!(scheme, "dns" | "unix" | "unix-abstract") {
        f.bare(format!(
            "tracing.endpoint: Invalid value: {}: unsupported scheme: {scheme}.  Options are none, dns, unix, or \
             unix-abstract.  {NAMING}",
            quote(&full)
        ));
    }
}
