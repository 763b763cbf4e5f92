//! `berth images`: image commands, sent to the running embedded runtime or run on its store.

mod files;
mod order_client;
mod progress_bars;
mod table;

use std::{
    io::{self, Read, Write},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand, ValueEnum};

use self::{order_client::OrderResult, progress_bars::ProgressBars};
use berth_runtime::{
    config::EmbeddedConfig,
    images::{
        commands::{CommandResponse, Image, ImageCommand},
        platform::{self, PlatformSelection},
        record::Platform,
    },
    settings,
};

/// Maximum length of a password read from standard input, in bytes.
const LONGEST_PASSWORD: u64 = 64 << 10;
/// Exit code that shells use for an interrupted program (128 + SIGINT).
const INTERRUPTED: u8 = 130;

#[derive(Subcommand, Debug)]
pub(super) enum ImagesSubcommand {
    /// List images
    #[command(visible_alias = "ls")]
    List(List),
    /// Pull images from a registry
    Pull(Pull),
    /// Import images from archives (OCI layout or docker save, optionally compressed)
    Import(Import),
    /// Export images to an archive that berth, ctr, and docker can import
    Export(Export),
    /// Print detailed information on images as JSON
    Inspect(Inspect),
    /// Remove images with all their tags (docker and podman remove only the given tag)
    #[command(visible_alias = "rm")]
    Remove(Remove),
    /// Verify the integrity of stored images
    Verify(Verify),
}

#[derive(Args, Debug)]
pub(super) struct List {
    /// List only this image: a name, an ID, or a prefix of an ID
    image: Option<String>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t)]
    output: ImageOutputFormat,
    /// Print only image IDs
    #[arg(short, long, conflicts_with = "output")]
    quiet: bool,
}

#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug, Default)]
enum ImageOutputFormat {
    /// Human-readable table with a row for each tag
    #[default]
    Table,
    /// Table with digests, platforms, and sources
    Wide,
    /// Complete JSON document
    Json,
}

#[derive(Args, Debug)]
pub(super) struct Pull {
    /// Image names
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<String>,
    /// Credentials for the registry
    #[arg(short, long, value_name = "NAME[:PASSWORD]")]
    user: Option<String>,
    /// Read the password from stdin
    #[arg(long, requires = "user")]
    password_stdin: bool,
    /// Platform of the image to pull [default: platform of this machine]
    #[arg(long, value_name = "OS/ARCH[/VARIANT]", value_parser = platform)]
    platform: Option<Platform>,
    /// Print only image IDs, without progress
    #[arg(short, long)]
    quiet: bool,
}

#[derive(Args, Debug)]
pub(super) struct Import {
    /// Archive files, directories with an OCI layout, or - for stdin
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Name for the imported images, instead of the name in the archive
    #[arg(long = "ref", value_name = "NAME")]
    name: Option<String>,
    /// Platform of the images to import [default: platform of this machine]
    #[arg(long, value_name = "OS/ARCH[/VARIANT]", value_parser = platform, conflicts_with = "all_platforms")]
    platform: Option<Platform>,
    /// Import the images of all platforms; those of other platforms are named by digest
    #[arg(long)]
    all_platforms: bool,
    /// Print only image IDs, without progress
    #[arg(short, long)]
    quiet: bool,
}

#[derive(Args, Debug)]
pub(super) struct Export {
    /// Image names or IDs
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<String>,
    /// File to write the archive to [default: stdout, unless it is a terminal]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Suppress progress output
    #[arg(short, long)]
    quiet: bool,
}

#[derive(Args, Debug)]
pub(super) struct Inspect {
    /// Image names, IDs, or prefixes of IDs
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<String>,
}

#[derive(Args, Debug)]
pub(super) struct Remove {
    /// Image names, IDs, or prefixes of IDs
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<String>,
    /// Treat "image not found" as a successful removal
    #[arg(long)]
    ignore_not_found: bool,
    /// Suppress output
    #[arg(short, long)]
    quiet: bool,
}

#[derive(Args, Debug)]
pub(super) struct Verify {
    /// Pull broken images again from their registries
    #[arg(long)]
    repair: bool,
    /// Suppress progress output
    #[arg(short, long)]
    quiet: bool,
}

/// Runs a command; the exit code is 0 only if all of it succeeded.
pub(super) fn run(command: ImagesSubcommand) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(async {
        tokio::select! {
            outcome = carry_out(command) => outcome.unwrap_or_else(|error| {
                eprintln!("error: {error:#}");
                ExitCode::FAILURE
            }),
            _ = tokio::signal::ctrl_c() => ExitCode::from(INTERRUPTED),
        }
    });
    // Background reads and writes end with the process.
    runtime.shutdown_background();
    code
}

async fn carry_out(command: ImagesSubcommand) -> Result<ExitCode> {
    let config = settings::read().map_err(anyhow::Error::msg)?;
    match command {
        ImagesSubcommand::List(wanted) => list(&config, &wanted).await,
        ImagesSubcommand::Pull(wanted) => pull(&config, wanted).await,
        ImagesSubcommand::Import(wanted) => import(&config, &wanted).await,
        ImagesSubcommand::Export(wanted) => export(&config, wanted).await,
        ImagesSubcommand::Inspect(wanted) => inspect(&config, &wanted).await,
        ImagesSubcommand::Remove(wanted) => remove(&config, &wanted).await,
        ImagesSubcommand::Verify(wanted) => verify(&config, &wanted).await,
    }
}

/// Runs one order with progress bars and returns its answer.
async fn run_order(
    config: &EmbeddedConfig,
    order: ImageCommand,
    file: Option<std::fs::File>,
    quiet: bool,
) -> Result<OrderResult> {
    let mut bars = ProgressBars::new(quiet);
    let answer = order_client::run_order(config, order, file, |shown| bars.show(&shown)).await;
    bars.end();
    answer
}

async fn list(config: &EmbeddedConfig, wanted: &List) -> Result<ExitCode> {
    let name = wanted.image.clone().unwrap_or_default();
    let images = run_order(config, ImageCommand::List { name: name.clone() }, None, true).await?.images()?;
    if images.is_empty() && !name.is_empty() {
        bail!("image {name:?}: not found");
    }
    let text = match wanted.output {
        _ if wanted.quiet => images.iter().map(|image| format!("{}\n", image.id)).collect(),
        ImageOutputFormat::Table => table::narrow(&images, jiff::Timestamp::now()),
        ImageOutputFormat::Wide => table::wide(&images, jiff::Timestamp::now()),
        ImageOutputFormat::Json => {
            format!("{}\n", serde_json::to_string_pretty(&serde_json::json!({ "images": images }))?)
        }
    };
    print(&text)
}

async fn pull(config: &EmbeddedConfig, wanted: Pull) -> Result<ExitCode> {
    let (user, mut password) = match wanted.user.as_deref().map(|user| user.split_once(':').unwrap_or((user, ""))) {
        Some((user, password)) => (user.to_owned(), password.to_owned()),
        None => (String::new(), String::new()),
    };
    if wanted.password_stdin {
        password.clear();
        io::stdin()
            .take(LONGEST_PASSWORD)
            .read_to_string(&mut password)
            .context("cannot read the password from stdin")?;
        password.truncate(password.trim_end_matches(['\r', '\n']).len());
    }
    each(&wanted.images, async |name| {
        if !wanted.quiet {
            eprintln!("pulling {name}");
        }
        let (user, password) = (user.clone(), password.clone());
        let order = ImageCommand::Pull { name: name.clone(), user, password, platform: wanted.platform.clone() };
        print_images("pulled", run_order(config, order, None, wanted.quiet).await?.images()?, wanted.quiet)
    })
    .await
}

async fn import(config: &EmbeddedConfig, wanted: &Import) -> Result<ExitCode> {
    let platforms = match &wanted.platform {
        _ if wanted.all_platforms => PlatformSelection::All,
        Some(platform) => PlatformSelection::Only(platform.clone()),
        None => PlatformSelection::Host,
    };
    each(&wanted.files, async |path| {
        let shown = path.display();
        let archive = files::archive(path, config).with_context(|| shown.to_string())?;
        if !wanted.quiet {
            eprintln!("importing {shown}");
        }
        let order = ImageCommand::Import { name: wanted.name.clone(), platforms: platforms.clone() };
        let answer = run_order(config, order, Some(archive), wanted.quiet).await?;
        print_images("imported", answer.images().with_context(|| shown.to_string())?, wanted.quiet)
    })
    .await
}

async fn export(config: &EmbeddedConfig, wanted: Export) -> Result<ExitCode> {
    let target = files::ExportTarget::open(wanted.output.as_deref())?;
    let order = ImageCommand::Export { names: wanted.images };
    run_order(config, order, Some(target.file()?), wanted.quiet).await?.done()?;
    target.finish()?;
    Ok(ExitCode::SUCCESS)
}

/// Prints a JSON list, also for one image; reports missing images on standard error and prints the others.
async fn inspect(config: &EmbeddedConfig, wanted: &Inspect) -> Result<ExitCode> {
    let (mut code, mut all) = (ExitCode::SUCCESS, Vec::new());
    for name in &wanted.images {
        let responses = run_order(config, ImageCommand::Inspect { name: name.clone() }, None, true).await?.responses();
        match responses {
            Ok(responses) => {
                let piece = |response| if let CommandResponse::Piece(piece) = response { Some(piece) } else { None };
                let text: String = responses.into_iter().filter_map(piece).collect();
                all.push(
                    serde_json::from_str::<serde_json::Value>(&text)
                        .context("cannot parse the response of the runtime")?,
                );
            }
            Err(error) => {
                eprintln!("error: {error:#}");
                code = ExitCode::FAILURE;
            }
        }
    }
    print(&format!("{}\n", serde_json::to_string_pretty(&all)?))?;
    Ok(code)
}

async fn remove(config: &EmbeddedConfig, wanted: &Remove) -> Result<ExitCode> {
    each(&wanted.images, async |name| {
        let answer = run_order(config, ImageCommand::Remove { name: name.clone() }, None, true).await?;
        if answer.is_unknown() && wanted.ignore_not_found {
            return Ok(());
        }
        for image in answer.images()? {
            let names = image.repo_tags.iter().chain(&image.repo_digests).map(|name| format!("untagged: {name}\n"));
            if !wanted.quiet {
                print(&format!("{}deleted: {}\n", names.collect::<String>(), image.id))?;
            }
        }
        Ok(())
    })
    .await
}

async fn verify(config: &EmbeddedConfig, wanted: &Verify) -> Result<ExitCode> {
    let answer = run_order(config, ImageCommand::Verify { repair: wanted.repair }, None, wanted.quiet).await?;
    let (mut broken, mut is_whole) = (0, true);
    for response in answer.responses()? {
        match response {
            CommandResponse::Broken { image, cause, repair } => {
                broken += 1;
                is_whole &= matches!(repair, Some(Ok(())));
                let repair_result = match repair {
                    None => String::new(),
                    Some(Ok(())) => " (repaired)".to_owned(),
                    Some(Err(why)) => format!(" (repair failed: {why})"),
                };
                print(&format!("{image}: {cause}{repair_result}\n"))?;
            }
            CommandResponse::Verified(images, layers) => {
                print(&format!("{images} images with {layers} layers verified, {broken} broken\n"))?;
            }
            _ => {}
        }
    }
    if !is_whole && !wanted.repair {
        eprintln!("run `berth images verify --repair` to pull broken images again");
    }
    Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn platform(text: &str) -> Result<Platform, String> {
    platform::parse(text).map_err(|error| error.text)
}

/// Runs `one` for each item in order; an error is printed and does not stop the rest.
async fn each<T>(all: &[T], one: impl AsyncFn(&T) -> Result<()>) -> Result<ExitCode> {
    let mut code = ExitCode::SUCCESS;
    for item in all {
        if let Err(error) = one(item).await {
            eprintln!("error: {error:#}");
            code = ExitCode::FAILURE;
        }
    }
    Ok(code)
}

fn print_images(what: &str, images: Vec<Image>, quiet: bool) -> Result<()> {
    for image in images {
        let line = if quiet {
            format!("{}\n", image.id)
        } else {
            let names = image.repo_tags.iter().chain(&image.repo_digests);
            let name = names.into_iter().next().map_or("<none>", String::as_str);
            format!("{what} {name} ({}, {})\n", image.id, table::size(image.size))
        };
        print(&line)?;
    }
    Ok(())
}

/// Writes to standard output; a closed pipe is not an error.
fn print(text: &str) -> Result<ExitCode> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(ExitCode::SUCCESS),
    }
}
