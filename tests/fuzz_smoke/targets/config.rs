//! Fuzz targets: kubelet configuration, drop-ins, command line flags, and durations.

use std::{ffi::OsString, os::unix::ffi::OsStringExt};

use berth_config::{FeatureGates, GoDuration, HostFacts, KubeletConfiguration, Personality, flags};

use super::text;

/// The main kubelet configuration file.
pub fn kubelet_config(data: &[u8]) {
    let gates = FeatureGates::new();
    let Ok((config, _)) = berth_config::file_decoder::main_file(&text(data), "/etc/k", &gates) else { return };
    judge(&config);
    let mut written = berth_config::configz::to_json(&config);
    let fields = written.as_object_mut().expect("an object");
    fields.insert("kind".to_owned(), berth_config::fields::KIND.into());
    fields.insert("apiVersion".to_owned(), berth_config::fields::API_VERSION.into());
    let (again, notices) =
        berth_config::file_decoder::main_file(&written.to_string(), "/etc/k", &gates).expect("what we write, we read");
    assert!(notices.is_empty(), "{notices:?}");
    assert_eq!(again, config, "written and read");
}

fn judge(config: &KubeletConfiguration) {
    let mut gates = FeatureGates::new();
    drop(gates.set_from_map(&config.feature_gates));
    drop(berth_config::validation::validate(config, &gates, &HostFacts::default()));
    drop(berth_config::validation::log_settings(config, &gates));
    drop(berth_config::reservations(config, &HostFacts::default()));
    drop(berth_config::configz::masked(config));
}

/// Drop-in configuration files, separated by lines of `%%`.
pub fn kubelet_dropin(data: &[u8]) {
    let (base, gates) = (berth_config::defaults::defaults(), FeatureGates::new());
    let all = text(data);
    let files: Vec<&str> = all.split("\n%%\n").collect();
    let merged = |files: &[&str]| {
        let texts = files.iter().map(|text| ("/d/x.conf".to_owned(), Ok((*text).to_owned())));
        berth_config::dropins::merge_texts(&base, "/d", texts, &gates).map(|(config, _)| config)
    };
    let Ok(config) = merged(&files) else { return };
    judge(&config);
    if let Some(last) = files.last() {
        let twice: Vec<&str> = files.iter().chain([last]).copied().collect();
        assert_eq!(merged(&twice).as_ref(), Ok(&config), "merging the last one again changes nothing");
    }
}

/// A Go duration.
pub fn go_duration(data: &[u8]) {
    let Ok(duration) = text(data).parse::<GoDuration>() else { return };
    assert_eq!(duration.to_string().parse(), Ok(duration), "{duration}");
    assert_eq!(duration.std().as_nanos(), u128::try_from(duration.nanos()).unwrap_or(0));
}

/// Arguments of a command line, one per line.
pub fn command_line(data: &[u8]) {
    let args: Vec<OsString> = data.split(|b| *b == b'\n').map(|word| OsString::from_vec(word.to_vec())).collect();
    let mut settings = flags::KubeletSettings { config: berth_config::defaults::defaults(), ..Default::default() };
    let parsed = flags::parse(&args, &mut settings);
    drop(flags::values(&settings));
    if parsed.is_ok() && settings.flags.config.is_empty() && settings.flags.config_dir.is_empty() {
        drop(berth_config::load(Personality::Kubelet, &args, &HostFacts::default()));
    }
}
