package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/setup"
)

// initOptions are the flags of init beside those of the configuration.
type initOptions struct {
	role, app                            string
	poll, yes, print, force, newPassword bool
}

func newInitCommand() *cobra.Command {
	var o initOptions
	cmd := &cobra.Command{
		Use: "init", Short: "Set up roles, tables and grants, and write walpost.yaml", Long: help("init"),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			t := talk{in: bufio.NewReader(cmd.InOrStdin()), out: cmd.OutOrStdout()}
			if _, t.terminal = terminalWidth(cmd.InOrStdin()); t.terminal {
				t.file, _ = cmd.InOrStdin().(*os.File)
			}
			for _, flag := range []string{"role", "owner", "app"} {
				if err := checkRole(flag, cmd.Flags().Lookup(flag).Value.String()); err != nil {
					return &usageError{err}
				}
			}
			return o.run(cmd, t)
		},
	}
	flags := cmd.Flags()
	flags.StringVar(&o.role, "role", "walpost", "the relay's role")
	flags.StringVar(&o.app, "app", "", "the role of the application that inserts events")
	flags.BoolVar(&o.poll, "poll", false, "set up a relay that polls the table: mode: poll")
	flags.BoolVar(&o.yes, "yes", false, "do not ask")
	flags.BoolVar(&o.print, "print", false, "print the plan as SQL, and change nothing")
	flags.BoolVar(&o.force, "force", false, "replace a configuration file that says something else")
	flags.BoolVar(&o.newPassword, "new-password", false, "give the relay's role a new password")
	addConfigFlags(cmd)
	owner := flags.Lookup("owner")
	owner.Usage, owner.Hidden = "the role that owns the tables (default the relay's role)", false
	return cmd
}

// checkRole refuses what PostgreSQL would cut off, and what could end a line of a script for psql.
func checkRole(flag, name string) error {
	switch {
	case name == "" && flag == "role":
		return hint.Errorf("leave --role out: it is walpost then", "--role is empty")
	case len(name) > 63 || strings.ContainsFunc(name, unicode.IsControl) || !utf8.ValidString(name):
		return hint.Errorf("PostgreSQL takes up to 63 bytes, and no line ends",
			"--%s: %q cannot be the name of a role", flag, name)
	}
	return nil
}

func (o *initOptions) run(cmd *cobra.Command, t talk) error {
	ctx := cmd.Context()
	c, err := loadInit(ctx, cmd.Flags(), o, t)
	if err != nil {
		return err
	}
	s, err := setup.Open(ctx, c.setup(o))
	if err != nil {
		return err
	}
	defer s.Close()
	source, err := c.source(ctx, s)
	if err != nil {
		return err
	}
	nats, err := lookAtNATS(ctx, c.cfg, source, s.Outboxes())
	if err == nil {
		err = c.checkNames(ctx, cmd.Flags(), o, s, nats)
	}
	if err != nil {
		return err
	}
	steps, err := s.Plan(ctx)
	if err != nil {
		return err
	}
	if err := c.makeRelays(ctx, o, s); err != nil {
		return err
	}
	file, err := c.file(o.force)
	if err != nil {
		return err
	}
	if o.print {
		return printScript(t.out, c, steps, nats.text)
	}
	if err := checkOwners(append(steps, file)); err != nil {
		return &usageError{err}
	}
	fmt.Fprintf(t.out, "%s\n%s\n\n", s.Server(), nats.text)
	printPlan(t.out, append(steps, file))
	switch open := pendingSteps(append(steps, file)); {
	case open == 0:
		fmt.Fprintln(t.out, "\nEverything is there already.")
	case !o.yes && !t.terminal:
		return &usageError{hint.Errorf("--yes does the plan without a question, --print writes it for psql",
			"init asks before it changes anything, and standard input is no terminal")}
	case !o.yes && !isYes(t.ask(fmt.Sprintf("\nDo %s? [y/N] ", count(open, "step")))):
		return errors.New("nothing was changed")
	}
	done := 0
	err = s.Do(ctx, append(steps, file), func(int) { done++ })
	if done > 0 {
		fmt.Fprintf(t.out, "\nDone: %s.\n", count(done, "step"))
	}
	if err != nil {
		return err
	}
	return c.finish(ctx, t.out, s, steps, o.app)
}

// finish runs doctor with the relay's own role, and says what is there and what comes next.
func (c *initConfig) finish(
	ctx context.Context, w io.Writer, s *setup.Setup, steps []*setup.Step, app string,
) error {
	fmt.Fprintln(w, "\nwalpost doctor:")
	found, err := examine(ctx, c.cfg)
	if err != nil {
		return err
	}
	failed := tellFindings(w, check.InOrder(found), false)
	fmt.Fprintln(w)
	c.summary(w, s)
	for _, step := range steps {
		if step.ByHand && !step.Done {
			fmt.Fprintf(w, "By hand: %s\n", strings.TrimPrefix(strings.Join(step.SQL, "; "), "-- "))
		}
	}
	if owner := s.Owner(); owner != "" {
		fmt.Fprintf(w, "%s owns the tables: run `walpost retention`, `walpost migrate up` and "+
			"`walpost dlq retry` with the URL of that role (--postgres-url).\n", owner)
	}
	if age := c.cfg.Retention.DeleteAfter; age > 0 {
		fmt.Fprintf(w, "Delivered events are deleted after %s (retention.delete_after; 0s keeps them).\n",
			formatDuration(age))
	}
	for _, name := range []string{
		"WALPOST_POSTGRES_URL", "WALPOST_POSTGRES_URL_FILE", "WALPOST_POSTGRES_PASSWORD_FILE",
	} {
		if os.Getenv(name) != "" {
			fmt.Fprintf(w, "Unset %s: it goes before %s, and is not the relay's.\n", name, c.path)
		}
	}
	if failed != nil {
		fmt.Fprintf(w, "Put right what doctor has found, and look again: %s\n", c.command("doctor"))
		return failed
	}
	inserts, err := s.HasProducer(ctx)
	if err != nil {
		return err
	}
	if !inserts && app == "" && !c.exists {
		fmt.Fprintf(w, "The role of your application may not insert events yet: %s --app ROLE, "+
			"with the URL as before.\n", c.command("init"))
	}
	if restart := s.Restart(); restart != "" {
		fmt.Fprintln(w, restart)
	}
	fmt.Fprintf(w, "Next: %s\n", c.start())
	return nil
}

// summary says what the relay has now.
func (c *initConfig) summary(w io.Writer, s *setup.Setup) {
	tables, _ := c.cfg.Tables() // they were checked when they were read
	var outboxes []string
	for _, t := range tables {
		outboxes = append(outboxes, t.String())
	}
	fmt.Fprintf(w, "Set up in database %s:\n", s.Database())
	fmt.Fprintf(w, "  outbox         %s\n", strings.Join(outboxes, ", "))
	fmt.Fprintf(w, "  relay's role   %s, password in %s\n", s.Role(), c.passwordFile)
	fmt.Fprintf(w, "  configuration  %s\n\n", c.path)
}

// command is a command line that uses the configuration.
func (c *initConfig) command(name string) string {
	if c.path == defaultConfigFile || c.path == systemConfigFile {
		return "walpost " + name
	}
	return "walpost " + name + " --config " + c.path
}

// systemUnits is where the packages have their units. A test has another.
var systemUnits = "/usr/lib/systemd/system"

// instanceName is the name of a file for the packages' template unit: systemd escapes other characters.
var instanceName = regexp.MustCompile(`^([A-Za-z0-9_][A-Za-z0-9_.-]*)\.yaml$`)

// start is the command that starts the relay: the unit of a package, where the file is in its directory.
func (c *initConfig) start() string {
	unit, template := "walpost", "walpost"
	if path := absolute(c.path); path != systemConfigFile {
		name := instanceName.FindStringSubmatch(filepath.Base(path))
		if name == nil || filepath.Dir(path) != filepath.Dir(systemConfigFile) {
			return c.command("run")
		}
		unit, template = "walpost@"+name[1], "walpost@"
	}
	if _, err := os.Stat(filepath.Join(systemUnits, template+".service")); err != nil {
		return c.command("run")
	}
	return "systemctl enable --now " + unit
}

// natsState is what NATS has.
type natsState struct {
	text   string
	exists bool     // the stream
	unused bool     // a relay has created it, and nothing is in it yet
	taken  string   // what another relay has, or ""
	flags  []string // which name that
}

// lookAtNATS fails where JetStream does not answer, before anything is changed. The relay writes as source,
// or "" where that is not known, from the outboxes.
func lookAtNATS(ctx context.Context, cfg *Config, source string, outboxes []string) (*natsState, error) {
	s, _, done, err := openStream(ctx, cfg, "walpost init")
	if err != nil {
		return nil, err
	}
	defer done()
	text := fmt.Sprintf("NATS %s: JetStream answers, and ", redactNATS(cfg.NATS.URL))
	info, err := s.Info(ctx)
	switch {
	case err == nil:
		state := &natsState{
			text: text + "stream " + cfg.NATS.Stream + " exists", exists: true, unused: info.Unused(),
		}
		writer, other, err := s.OtherWriter(ctx, info, source, outboxes...)
		if other && source != "" {
			state.taken = fmt.Sprintf("stream %s has the messages of %s", cfg.NATS.Stream,
				cmp.Or(writer, "another program"))
			state.flags = []string{"stream", "subject"}
		}
		return state, err
	case !errors.Is(err, jetstream.ErrStreamNotFound):
		return nil, err
	case !cfg.NATS.CreateStream:
		text += "stream " + cfg.NATS.Stream + " does not exist: nats.create_stream is false"
		return &natsState{text: text}, nil
	}
	state := &natsState{text: text + "the first run creates stream " + cfg.NATS.Stream}
	listener, err := s.SubjectsTakenBy(ctx)
	if listener != "" {
		state.taken = fmt.Sprintf("stream %s has subjects of %s", listener, cfg.NATS.Subject)
		state.flags = []string{"subject"}
	}
	return state, err
}

// talk is what init says and hears.
type talk struct {
	in       *bufio.Reader
	file     *os.File // what in reads, if it is a terminal
	out      io.Writer
	terminal bool
}

// ask returns an answer, "" where there is none.
func (t talk) ask(question string) string {
	t.show(question)
	answer, _ := t.in.ReadString('\n')
	return strings.TrimSpace(answer)
}

// askHidden is ask on a terminal, which does not show the answer. Nothing may be left in t.in: a terminal
// gives one line at a time.
func (t talk) askHidden(ctx context.Context, question string) (string, error) {
	fd := int(t.file.Fd())
	before, err := term.GetState(fd)
	if err != nil {
		return "", err
	}
	// A signal ends the process amid the question: the terminal shows again what is typed.
	defer context.AfterFunc(ctx, func() { _ = term.Restore(fd, before) })()
	t.show(question)
	answer, err := term.ReadPassword(fd)
	t.show("\n")
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return string(answer), err
}

func (t talk) show(text string) {
	fmt.Fprint(t.out, text)
	if s, ok := t.out.(*screen); ok {
		s.flush()
	}
}

func printPlan(w io.Writer, steps []*setup.Step) {
	for i, step := range steps {
		state := ""
		switch {
		case step.Done:
			state = "There already. "
		case step.ByHand:
			state = "By hand. "
		}
		fmt.Fprintf(w, "%2d. %s%s\n", i+1, state, step.Why)
		if step.Done {
			continue
		}
		for _, sql := range step.SQL {
			fmt.Fprintf(w, "      %s\n", sql)
		}
	}
}

func pendingSteps(steps []*setup.Step) (n int) {
	for _, step := range steps {
		if !step.Done && !step.ByHand {
			n++
		}
	}
	return n
}

// absolute is a path that holds wherever the relay is started.
func absolute(path string) string {
	if abs, err := filepath.Abs(path); err == nil {
		return abs
	}
	return path
}
